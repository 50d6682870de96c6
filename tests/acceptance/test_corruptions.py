"""A slice of `make corruptions`: real checkpoints of real ranks, damaged, judged by all that take them in."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from corruptions import nonsense
from corruptions.crew import Shape, warm_up
from corruptions.proof import CONTROLS, DAMAGED, KINDS, LINES, draw, run_cases

from everstep.checkpoint import lineage, reader, storage, verify
from everstep.checkpoint.manifest import Manifest
from everstep.errors import CheckpointDamaged

SEED = 7
ONE, TWO = Shape(1, False), Shape(2, True)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    warm_up()
    assert torch.get_num_threads() == 1, "ranks are forked from here"


def test_every_kind_of_damage_is_found_and_nothing_else_is() -> None:
    kinds = [*DAMAGED, *LINES, *CONTROLS]
    results = list(run_cases(kinds, seed=SEED, shapes=[TWO]))
    assert len(results) == len(kinds)
    assert [result for result in results if not result.right] == []
    assert [result for result in results if not result.found and result.kind not in CONTROLS] == []


def test_training_survives_storage_that_fails_and_writers_that_die() -> None:
    kinds = ["EIO in writing", "ENOSPC, the store is full", "writer killed before the manifest"]
    results = list(run_cases(kinds, seed=SEED, shapes=[ONE]))
    assert [result for result in results if not result.right] == []


def test_as_many_cases_are_drawn_as_are_asked_for_and_of_every_kind() -> None:
    drawn = draw(200, random.Random(SEED))
    assert len(drawn) == 200
    assert set(drawn) == set(KINDS)


class EqualToAll(str):
    """A hash that never differs."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def blind_for_hashes(patch: pytest.MonkeyPatch) -> None:
    same = SimpleNamespace(sha256=lambda content: SimpleNamespace(hexdigest=lambda: EqualToAll()))
    patch.setattr(storage, "hashlib", same)


def blind_for_what_is_missing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nonsense, "NONSENSE", {"larger": nonsense.tensor_larger})
    patch.setattr(reader, "check_whole", lambda described: None)
    patch.setattr(verify, "check_whole", lambda described: None)


def blind_for_lines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lineage, "line_of", lambda head, manifests, **_: list(manifests))


@pytest.mark.parametrize(
    ("blind", "kind", "words"),
    [
        (blind_for_hashes, "bit flip in a shard", "rank 0 loaded 2:8 with other values than were saved"),
        (
            blind_for_what_is_missing,
            "nonsense under right hashes",
            "rank 0 loaded 2:8 with other values than were saved",
        ),
        (blind_for_lines, "off the line", "chose 1:6"),
    ],
)
def test_the_proof_sees_a_reader_that_looks_away(
    monkeypatch: pytest.MonkeyPatch, blind: Callable[[pytest.MonkeyPatch], None], kind: str, words: str
) -> None:
    blind(monkeypatch)
    (result,) = run_cases([kind], seed=SEED, shapes=[ONE])
    assert words in result.accepted_bad


def test_the_proof_sees_a_reader_that_is_never_content(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path, manifest: Manifest) -> None:
        raise CheckpointDamaged("not today")

    monkeypatch.setattr(reader, "check_sizes", refuse)
    (result,) = run_cases(["control: untouched"], seed=SEED, shapes=[ONE])
    assert "not today" in result.refused_good
