"""The simulator itself: it passes on the real machine, finds what is planted, and tells it shortly."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from planted import PLANTS
from schedules import make_schedule
from simulate import main, run_schedule

from agents.protocol.messages import ProofKind


def last_json(text: str) -> dict[str, object]:
    found = json.loads(text.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def summary() -> dict[str, object]:
    """What 120 schedules on the real machine come to."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        code = main(["--schedules", "120", "--seed", "1", "--processes", "2"])
    return {"code": code, **last_json(told.getvalue())}


def test_no_rule_is_violated_on_the_real_machine(summary: dict[str, object]) -> None:
    assert (summary["code"], summary["schedules"], summary["violations"]) == (0, 120, 0)
    assert isinstance(summary["faults"], int)
    assert summary["faults"] > 200


def test_finds_a_relaunch_without_fence_proof_and_shortens_its_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedules", "20", "--seed", "1", "--plant", "no-fence", "--processes", "2"]) == 1
    told = capsys.readouterr().out
    assert "VIOLATED fenced-before-run" in told
    first = told.split("shortened from ")[1].splitlines()[0]
    assert int(first.split(" to ")[1].split()[0]) <= 3
    assert "--replay 1:" in told


PLANTED = {
    "no-lease-margin": ("lease-proof-is-true", 1, 37),
    "lease-without-stopped-peer": ("lease-proof-is-true", 1, 27),
    "old-plan-accepted": ("one-generation-alive", 1, 13),
    "no-taint": ("tainted-is-never-loaded", 1, 10),
    "one-witness": ("healthy-jobs-are-left-alone", 1, 107),
}
"""The rule that a bug breaks, and the seed and index of a schedule in which it soon does."""


@pytest.mark.parametrize("plant", PLANTED)
def test_finds_a_planted_bug_that_the_real_decisions_do_not_have(plant: str) -> None:
    rule, seed, start = PLANTED[plant]
    for index in range(start, start + 60):
        found = run_schedule(make_schedule(seed, index), plant=plant).violations
        if any(violation.rule == rule for violation in found):
            assert run_schedule(make_schedule(seed, index), plant="").violations == ()
            return
    pytest.fail(f"60 schedules from {seed}:{start} on do not show that {plant} breaks {rule}")


def test_every_bug_that_can_be_planted_is_found() -> None:
    assert set(PLANTED) == set(PLANTS) - {"no-fence"}


def test_the_same_schedule_gives_the_same_story() -> None:
    first, second = (run_schedule(make_schedule(4, 17), plant="") for _ in range(2))
    assert first == second


def test_a_schedule_can_be_replayed_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", "1:3"]) == 0
    assert "no rule was violated" in capsys.readouterr().out


def test_schedules_reach_every_part_of_the_pipeline(summary: dict[str, object]) -> None:
    moves = summary["moves"]
    assert isinstance(moves, dict)
    for wanted in (
        "verifying -> recovered",
        "launching -> stopping",
        "verifying -> stopping",
        "placing -> stopping",
        "placing -> waiting_for_checkpoint",
        "escalated -> stopping",
        "detected -> waiting_for_fence",
        "stopping -> waiting_for_fence",
        "waiting_for_fence -> stopping",
        "waiting_for_fence -> false_alarm",
    ):
        assert moves.get(wanted, 0) > 0, (wanted, moves)


def test_orders_to_run_stand_on_every_kind_of_proof_and_the_breaker_opens(summary: dict[str, object]) -> None:
    fences, breakers = summary["fences"], summary["breakers"]
    assert isinstance(fences, dict)
    assert isinstance(breakers, int)
    kinds = {ProofKind.PROC_SCAN_EMPTY, ProofKind.NEVER_STARTED, ProofKind.BOOT_CHANGED, ProofKind.LEASE_EXPIRED}
    assert set(fences) >= {kind.value for kind in kinds}
    assert fences.get("attestation", 0) + fences.get("provider", 0) > 0
    assert breakers > 0
