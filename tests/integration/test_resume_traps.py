"""The guide's traps, one by one: what goes wrong without its cure, and that the cure in its very words is one."""

from __future__ import annotations

import copy
import itertools
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from guide_blocks import blocks, quotes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep
from everstep.checkpoint.arena import Arena
from everstep.data.loader import SpannedCollate

SAMPLES, BATCH, TOTAL, SAVED = 24, 4, 10, 4
"""Six steps an epoch; the checkpoint lies in the middle of the first one."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("EVERSTEP_GENERATION", "EVERSTEP_RESUME", "EVERSTEP_LOG_DIR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def guide(name: str) -> Any:
    """What the guide's block of this name defines."""
    namespace: dict[str, Any] = {"torch": torch}
    exec(blocks()[name], namespace)
    return next(value for key, value in namespace.items() if key not in ("torch", "__builtins__"))


@dataclass
class Script:
    """A training script as its author would write it: what it builds, what it tracks, what one step does."""

    tracked: dict[str, Any]
    body: Callable[[int, Any], torch.Tensor]
    """Makes the step on a batch, and returns its loss."""
    loader: Callable[[], Any]
    """Called after `resume`."""
    seen: dict[int, Any] = field(default_factory=dict)


def dataset() -> TensorDataset:
    data = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(9))
    return TensorDataset(data, data.sum(1, keepdim=True))


def script(**others: Any) -> Script:
    """A model with dropout; `others` are tracked beside it."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    sampler = everstep.ReplayableSampler(SAMPLES, global_batch_size=BATCH, seed=1)

    def body(step: int, batch: Any) -> torch.Tensor:
        inputs, targets = batch.data
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    parts = {"model": model, "optimizer": optimizer, "scheduler": None, "sampler": sampler, **others}
    return Script(parts, body, lambda: everstep.replayable_loader(dataset(), sampler))


def run_script(root: Path, made: Script, *, total: int = TOTAL) -> dict[int, str]:
    """Train from the newest checkpoint on; each step's loss to its last bit."""
    run = everstep.Run(total_steps=total, save_every=SAVED, seed=3, checkpoint_directory=root)
    run.track(**made.tracked)
    run.resume()
    losses = {}
    for step, batch in zip(run.steps(), run.batches(made.loader()), strict=False):
        loss = made.body(step, batch)
        losses[step] = float(loss).hex()
        made.seen[step] = batch
        run.report(loss=loss, span=getattr(batch, "span", None))
    run._stop()  # what the end of the process does
    return losses


def goes_on_alike(root: Path, make: Callable[[], Script], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a run that is resumed from step 4 repeats the one that went through."""
    torch.manual_seed(0)
    whole = run_script(root, make())
    monkeypatch.setenv("EVERSTEP_GENERATION", "2")
    monkeypatch.setenv("EVERSTEP_RESUME", f"1:{SAVED}")
    resumed = run_script(root, make())
    assert sorted(resumed) == list(range(SAVED + 1, TOTAL + 1))
    return resumed == {step: loss for step, loss in whole.items() if step > SAVED}


def noisy(noise: Any, *, tracked: bool) -> Script:
    made = script(**({"noise": noise} if tracked else {}))
    inner = made.body

    def body(step: int, batch: Any) -> torch.Tensor:
        inputs, targets = batch.data
        noised = inputs + torch.randn(inputs.shape, generator=noise.generator)
        return inner(step, everstep.SpannedBatch((noised, targets), batch.span))

    return Script(made.tracked, body, made.loader)


@pytest.mark.parametrize("tracked", [True, False])
def test_generator_of_the_scripts_own_goes_on_only_if_it_is_tracked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracked: bool
) -> None:
    noise = guide("noise")
    assert goes_on_alike(tmp_path, lambda: noisy(noise(), tracked=tracked), monkeypatch) is tracked


@pytest.mark.parametrize("replayable", [True, False])
def test_loader_that_draws_from_the_global_generator_shifts_dropout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replayable: bool
) -> None:
    def make() -> Script:
        made = script()
        spanned: Any = everstep.SpannedDataset(dataset())
        if not replayable:
            made.loader = lambda: DataLoader(
                spanned, batch_sampler=made.tracked["sampler"], collate_fn=SpannedCollate(None)
            )
        return made

    assert goes_on_alike(tmp_path, make, monkeypatch) is replayable


def test_distributed_sampler_begins_its_epoch_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Script:
        made = script()
        sampler: Any = DistributedSampler(dataset(), num_replicas=1, rank=0)
        made.tracked["sampler"] = None
        made.loader = lambda: DataLoader(dataset(), BATCH, sampler=sampler)
        inner = made.body
        made.body = lambda step, batch: inner(step, everstep.SpannedBatch(batch, None))  # type: ignore[arg-type]
        return made

    whole, resumed = make(), make()
    run_script(tmp_path, whole)
    monkeypatch.setenv("EVERSTEP_GENERATION", "2")
    monkeypatch.setenv("EVERSTEP_RESUME", f"1:{SAVED}")
    run_script(tmp_path, resumed)
    assert resumed.seen[SAVED + 1][0].equal(whole.seen[1][0]), "the epoch's first samples again"
    assert whole.seen[7][0].equal(whole.seen[1][0]), "and without set_epoch each epoch has the same order"


@pytest.mark.parametrize("by_span", [True, False])
def test_scheduler_of_epochs_steps_at_the_same_steps_only_by_the_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_span: bool
) -> None:
    step_scheduler = guide("epoch_scheduler")

    def make() -> Script:
        made = script()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(made.tracked["optimizer"], 0.1)
        made.tracked["scheduler"] = scheduler
        inner, counter = made.body, itertools.count(1)

        def body(step: int, batch: Any) -> torch.Tensor:
            loss = inner(step, batch)
            if by_span:
                step_scheduler(scheduler, batch.span)
            elif next(counter) % (SAMPLES // BATCH) == 0:
                scheduler.step()
            return loss

        made.body = body
        return made

    assert goes_on_alike(tmp_path, make, monkeypatch) is by_span


@pytest.mark.parametrize("within", [True, False])
def test_accumulated_gradients_survive_only_within_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    accumulate = guide("accumulation")

    def make() -> Script:
        made = script()
        model, optimizer = made.tracked["model"], made.tracked["optimizer"]

        def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return (outputs - targets).square().mean()

        def in_one_step(step: int, batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.tensor(accumulate(model, mean_square, batch, 2))
            optimizer.step()
            return loss

        def over_three_steps(step: int, batch: Any) -> torch.Tensor:
            inputs, targets = batch.data
            loss = mean_square(model(inputs), targets)
            loss.backward()
            if step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        made.body = in_one_step if within else over_three_steps
        return made

    assert goes_on_alike(tmp_path, make, monkeypatch) is within


def test_accumulated_loss_and_gradients_are_those_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    twin = copy.deepcopy(model)
    inputs, targets = dataset().tensors
    batch = everstep.SpannedBatch((inputs[:7], targets[:7]), everstep.SampleSpan(epoch=0, start=0, stop=7, count=7))
    loss = guide("accumulation")(model, nn.functional.mse_loss, batch, 3)
    whole = nn.functional.mse_loss(twin(inputs[:7]), targets[:7])
    whole.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(model.weight.grad, twin.weight.grad)


@pytest.mark.parametrize("tracked", [True, False])
def test_scaler_and_averaged_weights_go_on_only_if_they_are_tracked(tmp_path: Path, tracked: bool) -> None:
    def run_to(total: int) -> tuple[float, list[torch.Tensor]]:
        run = everstep.Run(total_steps=total, save_every=SAVED, seed=3, checkpoint_directory=tmp_path)
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler, ema = guide("others")(run, model, optimizer, None, None)
        if not tracked:
            run.track(scaler=None, ema=None)
        run.resume()
        for _ in run.steps():
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 6)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update(new_scale=8.0)
            ema.update_parameters(model)
        run._stop()
        return scaler.get_scale(), [parameter.clone() for parameter in ema.parameters()]

    scale, average = run_to(4)
    again_scale, again_average = run_to(4)
    assert scale == 8.0 and (again_scale == scale) is tracked
    same = all(torch.equal(one, other) for one, other in zip(average, again_average, strict=True))
    assert same is tracked


@pytest.mark.parametrize("compiled", [(True, False), (False, True)], ids=["compiled first", "compiled last"])
def test_compiled_model_and_plain_one_resume_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: tuple[bool, bool]
) -> None:
    turns = iter(compiled)

    def make() -> Script:
        made = script()
        if next(turns):
            made.tracked["model"] = torch.compile(made.tracked["model"], backend="eager")
        return made

    assert goes_on_alike(tmp_path, make, monkeypatch)


def test_evaluation_is_a_phase_and_leaves_training_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_LOG_DIR", str(tmp_path / "log"))
    run = everstep.Run(total_steps=1, checkpoint_directory=tmp_path / "c")
    model = nn.Sequential(nn.Linear(6, 1), nn.Dropout(0.5))
    run.track(model=model, optimizer=None, scheduler=None, sampler=None)
    run.resume()
    for _ in run.steps():
        before = torch.get_rng_state()
        inputs, targets = dataset().tensors
        loss = guide("evaluation")(run, model, [(inputs, targets)] * 2, nn.functional.mse_loss)
        assert loss == pytest.approx(nn.functional.mse_loss(model[0](inputs), targets).item())
        assert model.training and torch.get_rng_state().equal(before)
    run._stop()
    lines = [json.loads(line) for line in (tmp_path / "log" / "rank-0.jsonl").read_text().splitlines()]
    phases = [line["phase"] for line in lines if line["kind"] == "phase"]
    assert "evaluation" in phases


# --- What Everstep says --------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def errors_of_a_script(root: Path) -> Iterator[Callable[[], Any]]:
    """Calls that go wrong, each by itself."""

    def fresh(**parts: Any) -> everstep.Run:
        run = everstep.Run(total_steps=4, save_every=2, checkpoint_directory=root / "errors")
        run.track(**{"model": None, "optimizer": None, "scheduler": None, "sampler": None, **parts})
        return run

    yield lambda: fresh(noise=torch.Generator())
    yield lambda: fresh(sampler=DistributedSampler(dataset(), num_replicas=1, rank=0))
    yield lambda: everstep.ReplayableSampler(90, global_batch_size=9, rank=0, world_size=2)
    yield lambda: Arena(1 << 50)

    def unsavable() -> None:
        run = fresh(ema=Holder(decay=guide))
        run.resume()
        next(run.steps())

    def epochs() -> None:
        run = fresh()
        run.resume()
        for _ in range(2):
            for _ in zip(run.steps(), range(2), strict=False):
                continue

    yield unsavable
    yield epochs


def warnings_of_a_script(root: Path) -> None:
    """Everything that a careless script is warned of."""
    everstep.Run(total_steps=1, checkpoint_directory=root / "left-out").resume()
    run = everstep.Run(total_steps=4, save_every=2, checkpoint_directory=root / "spans")
    sampler = everstep.ReplayableSampler(40, global_batch_size=4)
    run.track(model=None, optimizer=None, scheduler=None, sampler=sampler)
    run.resume()
    steps, batches = run.steps(), run.batches(sampler.stream())
    next(batches)
    next(steps)
    run.report(span=everstep.SampleSpan(epoch=0, start=8, stop=12))
    steps.close()
    run._stop()
    run = everstep.Run(total_steps=4, save_every=2, checkpoint_directory=root / "unsaved")
    run.track(model=nn.Linear(1, 1), optimizer=None, scheduler=None, sampler=None)
    run.resume()
    for step in run.steps():
        if step == 2:
            run._saver.settle()  # type: ignore[union-attr]
            shutil.rmtree(root / "unsaved" / "generation-00001")
            (root / "unsaved" / "generation-00001").write_text("in the way")
        if step == 3:
            break
    run._stop()


def said_by_ranks(root: Path) -> list[str]:
    """Of two ranks and of four, and of one that goes on after two."""

    def averaging(rank: int, *, total: int) -> list[str]:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        run = everstep.Run(total_steps=total, checkpoint_directory=root / "own")
        run.track(model=model, optimizer=None, scheduler=None, sampler=None)
        run.resume()
        for _ in run.steps():
            model(torch.randn(4, 6))
        return []

    def replicated(rank: int, *, ranks: int) -> list[str]:
        torch.use_deterministic_algorithms(True)
        run = everstep.Run(total_steps=3, checkpoint_directory=root / f"ranks-{ranks}")
        run.track(model=DistributedDataParallel(nn.Linear(1, 1)), optimizer=None, scheduler=None, sampler=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.resume()
            if ranks == 2:
                list(run.steps())
        return [str(warning.message) for warning in caught]

    run_ranks(root, lambda rank: averaging(rank, total=2), world_size=2)
    (refusal,) = run_ranks(root, lambda rank: averaging(rank, total=2), world_size=1)
    four = run_ranks(root, lambda rank: replicated(rank, ranks=4), world_size=4)
    run_ranks(root, lambda rank: replicated(rank, ranks=2), world_size=2)
    (one,) = run_ranks(root, lambda rank: replicated(rank, ranks=2), world_size=1)
    return [str(refusal), *four[0], *one]


def alike(text: str) -> str:
    """Without what differs from run to run: paths and amounts."""
    text = re.sub(r"/[\w/.-]+(?=[\s:'.])", "/PATH", text.strip())
    return re.sub(r"\d+ MiB", "N MiB", re.sub(r"step-\d+-\w+", "STEP", text))


def test_everstep_says_what_the_guide_quotes(tmp_path: Path) -> None:
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in errors_of_a_script(tmp_path):
            with pytest.raises(everstep.EverstepError) as raised:
                call()
            said.append(str(raised.value))
        warnings_of_a_script(tmp_path)
    said += [str(warning.message) for warning in caught] + said_by_ranks(tmp_path)
    missing = [quote for quote in quotes() if alike(quote) not in {alike(text) for text in said}]
    elsewhere = [quote for quote in quotes() if "FullyShardedDataParallel" in quote]  # in test_resume_sharded.py
    assert len(quotes()) > 10 and len(elsewhere) == 1
    assert missing == elsewhere, f"nobody says {missing}, but {said}"
