from __future__ import annotations

import pytest
from domain_scenes import NOW, ended_well, exited, killed, plan, training
from hypothesis import given
from hypothesis import strategies as st

from recovery.domain.diagnosis import TIE_WINDOW_S, diagnose
from recovery.domain.generations import RankView
from recovery.domain.incident import Cause, CauseKind

FOUR = plan(1, per_node=2)
"""Ranks 0 and 1 on gpu-01, 2 and 3 on gpu-02."""


def live(number: int) -> RankView:
    return training(number, of=FOUR)


def cause_of(*ranks: RankView) -> Cause:
    cause = diagnose(ranks)
    assert cause is not None
    return cause


def test_finds_nothing_where_nobody_died() -> None:
    assert diagnose([live(0), live(1)]) is None
    assert diagnose([]) is None


def test_a_normal_end_is_no_death() -> None:
    assert diagnose([ended_well(live(0)), live(1)]) is None


def test_a_killed_rank_is_named_with_its_signal_node_and_step() -> None:
    cause = cause_of(live(0), killed(live(2)))
    assert (cause.kind, cause.rank, cause.node) == (CauseKind.RANK_KILLED, 2, "gpu-02")
    assert cause.sentence == "Rank 2 on gpu-02 was killed by signal 9 (SIGKILL), after step 50."


def test_case_R29_exit_code_7_shows_code_and_rank() -> None:
    cause = cause_of(exited(live(0), code=7, detail="ValueError: bad batch"), live(2))
    assert cause.kind is CauseKind.RANK_FAILED
    assert "Rank 0 on gpu-01 exited with code 7: ValueError: bad batch" in cause.sentence


def test_case_R29_own_exit_is_not_outranked_by_what_the_runner_kills_after_it() -> None:
    # Torch elastic ends the rest of the node 50 ms after the first exit.
    cause = cause_of(exited(live(0), code=7, at=NOW), killed(live(1), signal=15, at=NOW + 0.05))
    assert (cause.rank, cause.kind, cause.cascade) == (0, CauseKind.RANK_FAILED, (1,))


def test_kill_of_a_sibling_is_a_cascade_even_by_sigkill() -> None:
    cause = cause_of(exited(live(2), code=1, at=NOW), killed(live(3), signal=9, at=NOW + 0.2))
    assert cause.rank == 2


def test_signal_comes_before_the_echo_of_a_collective_that_was_told_earlier() -> None:
    echo = exited(live(0), code=1, at=NOW, detail="RuntimeError: Connection closed by peer")
    cause = cause_of(echo, killed(live(2), at=NOW + 0.4))
    assert (cause.rank, cause.cascade) == (2, (0,))


def test_own_error_long_before_a_signal_is_no_echo_of_it() -> None:
    cause = cause_of(exited(live(0), code=1, at=NOW, detail="ValueError"), killed(live(2), at=NOW + 1.5))
    assert cause.rank == 0


def test_own_exception_comes_before_a_collectives_error_that_was_told_earlier() -> None:
    echo = exited(live(0), code=1, at=NOW, detail="torch.distributed.DistBackendError: NCCL error")
    own = exited(live(2), code=1, at=NOW + 0.8, detail="KeyError: 'text'")
    cause = cause_of(echo, own)
    assert (cause.rank, cause.cascade) == (2, (0,))


def test_a_lone_collective_error_is_told_as_it_is() -> None:
    cause = cause_of(exited(live(0), code=1, detail="RuntimeError: Connection reset by peer"), live(2))
    assert cause.rank == 0
    assert "Connection reset by peer" in cause.sentence


@pytest.mark.parametrize(("gap", "tied"), [(TIE_WINDOW_S / 2, (2,)), (TIE_WINDOW_S * 2, ())])
def test_deaths_of_one_class_within_the_window_are_a_tie(gap: float, tied: tuple[int, ...]) -> None:
    cause = cause_of(killed(live(0), at=NOW), killed(live(2), at=NOW + gap))
    assert cause.tied_with == tied
    assert ("it ties with rank 2" in cause.sentence) == bool(tied)
    assert cause.cascade == (() if tied else (2,))


def test_different_classes_never_tie() -> None:
    cause = cause_of(killed(live(0), at=NOW), exited(live(2), code=1, at=NOW))
    assert (cause.rank, cause.tied_with, cause.cascade) == (0, (), (2,))


def test_exit_code_0_before_the_last_step_is_an_early_exit() -> None:
    cause = cause_of(exited(live(0), code=0), live(2))
    assert cause.kind is CauseKind.EARLY_EXIT
    assert cause.sentence == "Rank 0 on gpu-01 exited with code 0 before its last step (it stood at step 50)."


def test_an_end_that_nobody_saw_has_no_known_exit_code() -> None:
    assert "exited without a known exit code" in cause_of(exited(live(0), code=None)).sentence


def test_only_the_last_line_of_an_error_is_told_and_it_is_cut() -> None:
    cause = cause_of(exited(live(0), code=1, detail="Traceback\n  File\n" + "x" * 1000 + "\n"))
    assert "Traceback" not in cause.sentence
    assert len(cause.sentence) < 400


_deaths = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from([0, 1, 7, None, -9, -15]),
        st.floats(0, 5),
        st.sampled_from(["", "ValueError", "Connection closed by peer"]),
    ),
    unique_by=lambda death: death[0],
    min_size=1,
    max_size=4,
)


@given(deaths=_deaths)
def test_every_death_is_the_cause_or_tied_or_cascade_in_any_order(
    deaths: list[tuple[int, int | None, float, str]],
) -> None:
    ranks = [
        killed(live(number), signal=-how, at=NOW + at)
        if how is not None and how < 0
        else exited(live(number), code=how, at=NOW + at, detail=detail)
        for number, how, at, detail in deaths
    ]
    cause = cause_of(*ranks)
    assert sorted([cause.rank or 0, *cause.tied_with, *cause.cascade]) == sorted(number for number, *_ in deaths)
    assert diagnose(ranks[::-1]) == cause
