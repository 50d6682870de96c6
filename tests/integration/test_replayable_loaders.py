"""Loaders with worker processes, prefetching and persistent workers: a resumed run sees just the samples that follow.

Each test trains on through two epochs and more, stops at a step that no epoch and no worker count divides, and compares
the resumed run, sample by sample, with one that was never interrupted.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import everstep
from everstep.data import IndexBatch

pytestmark = [
    pytest.mark.filterwarnings("error:Step"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

SIZE, BATCH, STOP, TOTAL = 50, 4, 17, 30


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in [name for name in os.environ if name.startswith("EVERSTEP_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(variable, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Numbers(torch.utils.data.Dataset[list[float]]):
    """Sample n is [n, a number drawn for it]: what random augmentation does."""

    def __init__(self, size: int = SIZE, draw: Callable[[], float] = lambda: 0.0) -> None:
        self.size, self.draw = size, draw

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> list[float]:
        return [index, self.draw()]


class CountingNumbers(Numbers):
    """With a state of its own: how many samples this copy has given."""

    given = 0

    def __getitem__(self, index: int) -> list[float]:
        self.given += 1
        return [index, self.given]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Lines(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


def draw_everywhere() -> float:
    return random.random() + torch.rand(()).item()


def train(root: Path, order: Any, batches: Any, *, until: int = TOTAL) -> dict[int, tuple[Any, Any]]:
    """Step to (span, samples), of this run alone; it is killed, as it were, after step `until`."""
    run = everstep.Run(total_steps=TOTAL, save_every=STOP, checkpoint_directory=root)
    run.track(model=nn.Linear(1, 1), optimizer=None, scheduler=None, sampler=order)
    run.resume()
    seen: dict[int, tuple[Any, Any]] = {}
    # The batch is asked for before the step, and one more is fetched ahead of training.
    fetched = iter(batches)
    ahead = next(fetched)
    for step in run.steps():
        batch, ahead = ahead, next(fetched)
        seen[step] = (batch.span, batch.data)
        run.report(loss=torch.rand(()), span=batch.span)
        assert batch.span.indices_digest is not None
        if step > until:
            run._stop()  # as at the end of the process: what was copied before is brought to disk
            break
    return seen


def map_style(workers: int, **options: Any) -> tuple[Any, Any]:
    order = everstep.ReplayableSampler(SIZE, global_batch_size=BATCH, seed=3)
    settings: dict[str, Any] = (
        {"num_workers": workers, "multiprocessing_context": "fork", "prefetch_factor": 3} if workers else {}
    )
    dataset = options.pop("dataset", None) or Numbers()
    return order, everstep.replayable_loader(dataset, order, collate_fn=list, **settings, **options)


def stateful(make: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    order, loader = make()
    batches = everstep.StatefulBatches(loader, order)
    return batches, batches


def stream(workers: int, loader_class: Any = torch.utils.data.DataLoader) -> tuple[Any, Any]:
    order = everstep.ReplayableStream(Lines(), global_batch_size=BATCH, collate=list, drop_last=False)
    settings: dict[str, Any] = (
        {"num_workers": workers, "multiprocessing_context": "fork", "prefetch_factor": 3} if workers else {}
    )
    return order, loader_class(order, batch_size=None, generator=torch.Generator(), **settings)


CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "map-style, no workers": lambda: map_style(0),
    "map-style, 2 workers": lambda: map_style(2),
    "map-style, 2 persistent workers": lambda: map_style(2, persistent_workers=True),
    "map-style, augmented in 2 workers": lambda: map_style(2, dataset=Numbers(draw=draw_everywhere), sample_seed=5),
    "map-style, augmented, no workers": lambda: map_style(0, dataset=Numbers(draw=draw_everywhere), sample_seed=5),
    "stream, no workers": lambda: stream(0),
    "stream, 2 workers": lambda: stream(2),
    "StatefulDataLoader, map-style, no workers": lambda: stateful(
        lambda: map_style(0, loader_class=StatefulDataLoader, dataset=CountingNumbers())
    ),
    "StatefulDataLoader, map-style, 2 workers": lambda: stateful(
        lambda: map_style(2, loader_class=StatefulDataLoader, dataset=CountingNumbers(), persistent_workers=True)
    ),
    "StatefulDataLoader, stream, no workers": lambda: stateful(lambda: stream(0, StatefulDataLoader)),
    "StatefulDataLoader, stream, 2 workers": lambda: stateful(lambda: stream(2, StatefulDataLoader)),
}


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_goes_on_with_exactly_the_samples_that_follow(case: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", *CASES[case]())
    first = train(tmp_path / "again", *CASES[case](), until=STOP)
    resumed = train(tmp_path / "again", *CASES[case]())
    assert min(resumed) == STOP + 1, "it was stopped a step beyond its checkpoint"
    assert {**first, **resumed} == whole
    assert {step: first[step] for step in first} == {step: whole[step] for step in first}
    ends = [(span.epoch, span.stop) for span, _ in whole.values() if span.stop >= SIZE - BATCH]
    assert ends[-1][0] == 1, "two epochs were trained through"


def test_augmentation_is_the_same_for_each_number_of_workers_and_training_draws_go_on_unmoved(tmp_path: Path) -> None:
    found = []
    for workers in (0, 2):
        random.seed(1)
        torch.manual_seed(1)
        _, loader = map_style(workers, dataset=Numbers(draw=draw_everywhere), sample_seed=5)
        batches = iter(loader)
        found.append([next(batches).data for _ in range(5)])
        found.append([random.random(), torch.rand(()).item()])
    assert found[0] == found[2] and found[1] == found[3]
    random.seed(1)
    torch.manual_seed(1)
    assert [random.random(), torch.rand(()).item()] == found[1]


def test_loader_state_of_other_workers_is_left_alone_and_the_position_still_exact(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", *stateful(lambda: stream(0, StatefulDataLoader)))
    train(tmp_path / "again", *stateful(lambda: stream(2, StatefulDataLoader)), until=STOP)
    resumed = train(tmp_path / "again", *stateful(lambda: stream(1, StatefulDataLoader)))
    assert resumed == {step: seen for step, seen in whole.items() if step > STOP}


@pytest.mark.filterwarnings("always:Step")
def test_loader_that_skips_one_sample_while_its_spans_go_on_is_seen_at_once(tmp_path: Path) -> None:
    class Skips(everstep.ReplayableSampler):
        def stream(self) -> Iterator[IndexBatch]:
            for batch in super().stream():
                skipping = batch.span.start >= 20
                yield IndexBatch([(i + skipping) % SIZE for i in batch], batch.span) if skipping else batch

    order = Skips(SIZE, global_batch_size=BATCH, shuffle=False)
    loader = everstep.replayable_loader(Numbers(), order, collate_fn=list)
    with pytest.warns(UserWarning, match=r"Step 6: .*\[20, 24\) of epoch 0.*other samples than"):
        train(tmp_path, order, loader, until=5)


def test_wrapper_refuses_a_loader_that_cannot_tell_its_state_or_its_spans() -> None:
    order, loader = map_style(0)
    with pytest.raises(everstep.UsageError, match="needs a torchdata StatefulDataLoader"):
        everstep.StatefulBatches(loader, order)
    with pytest.raises(everstep.UsageError, match="snapshot_every_n_steps=1"):
        everstep.StatefulBatches(map_style(0, loader_class=StatefulDataLoader, snapshot_every_n_steps=2)[1], order)
    with pytest.raises(everstep.UsageError, match="without a span"):
        next(iter(everstep.StatefulBatches(StatefulDataLoader(Numbers(), batch_size=BATCH), order)))
