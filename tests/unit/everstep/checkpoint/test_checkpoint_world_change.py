from __future__ import annotations

from typing import Any

import pytest

from everstep.checkpoint.description import SAME
from everstep.checkpoint.manifest import CheckpointName, Manifest
from everstep.checkpoint.world_change import check_world_change
from everstep.errors import UsageError

MANIFEST = Manifest(
    name=CheckpointName(generation=1, step=60),
    parent=None,
    job="job-1",
    total_steps=100,
    world_size=2,
    created_at=0.0,
    torch_version="2.9",
    files=(),
)


class Sampler:
    """What knows its position for each world size."""

    def commit(self, span: object) -> None: ...


def rank_file(own: tuple[str, ...] = (), handed_on: tuple[str, ...] = (), **parts: Any) -> dict[str, Any]:
    return {
        "own_keys": {path: f"{path}@rank" for path in own},
        "handed_on": list(handed_on),
        "parts": {"model": {"$": "dict", "items": []}, **parts},
    }


def check(*ranks: dict[str, Any], **tracked: object) -> None:
    check_world_change(MANIFEST, ranks, tracked, world_size=3)


def test_what_all_ranks_held_alike_is_taken_over() -> None:
    check(rank_file(), rank_file(model=SAME))
    check(rank_file(), rank_file())


def test_generators_and_what_a_sampler_keeps_beside_its_position_are_nobodys_own() -> None:
    check(
        rank_file(own=("sampler/worker",), rng=1, sampler=1),
        rank_file(own=("sampler/worker",), rng=2, sampler=2, model=SAME),
        sampler=Sampler(),
    )


def test_buffers_that_rank_0_hands_to_all_are_taken_from_it() -> None:
    paths = ("model/mean", "model/var")
    check(rank_file(own=paths, handed_on=paths), rank_file(own=paths, model=SAME))


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (rank_file(own=("model/a", "model/b"), model=SAME), "model/a, model/b differed"),
        (rank_file(own=tuple(f"model/{n}" for n in range(5)), model=SAME), "model/0, model/1, model/2 and 2 more"),
        (rank_file(model={"$": "dict", "items": [["loss", 1.0]]}), ": model differed"),
        (rank_file(model=SAME, meter={"$": "dict", "items": []}), ": meter differed"),
    ],
)
def test_what_was_each_ranks_own_is_refused_by_name(second: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named) as refused:
        check(rank_file(own=tuple(second["own_keys"])), second)
    assert "Cannot resume from checkpoint 1:60 of 2 ranks with 3" in str(refused.value)
    assert "Resume with 2 ranks" in str(refused.value)
