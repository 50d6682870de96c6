"""When a silent node's ranks cannot act any more, as the server counts it: never shorter than the runner does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domain_scenes import NOW, TERMS, ended_well, exited, leased, lost, node, proven, stopping, training
from hypothesis import given
from hypothesis import strategies as st

from recovery.domain.generations import GenerationView, ProofKind
from recovery.domain.lease import DRIFT, MARGIN_S, lease_ends_at, lease_proof, longest_limit_s, peer_stopped_at, raised
from recovery.domain.plan import LeaseLimits

LONGEST = 30.0 * (1 + DRIFT) + MARGIN_S
SETUP = 1800.0 * (1 + DRIFT) + MARGIN_S


def one_stopped(at: float = NOW - 5) -> GenerationView:
    """Generation 1, wanted gone: gpu-01 has proven its stop, gpu-02 has been silent."""
    return proven(stopping(leased(1, ago_s=12.5)), "gpu-01", at=at)


def ends_at(view: GenerationView, *, synchronous: bool = True, **silent: object) -> float | None:
    share = next(part for part in view.shares if part.node == "gpu-02")
    return lease_ends_at(share, view, lost("gpu-02", **silent), synchronous=synchronous)  # type: ignore[arg-type]


def test_counts_from_the_later_of_last_contact_and_a_peers_stop() -> None:
    assert ends_at(one_stopped(at=NOW - 5)) == pytest.approx(NOW - 5 + LONGEST)
    assert ends_at(one_stopped(at=NOW - 40)) == pytest.approx(NOW - 12 + LONGEST)


def test_a_step_that_a_thawed_node_tells_of_counts_like_contact_and_its_setup_is_not_forgotten() -> None:
    view = one_stopped(at=NOW - 40)
    thawed = replace(view.ranks[1], progress_at=NOW - 1, progress_seen_at=NOW - 0.9, resumed_step=47, last_step=50)
    assert ends_at(replace(view, ranks=(view.ranks[0], thawed))) == pytest.approx(NOW - 0.9 + LONGEST)


def test_an_exit_long_before_the_silence_counts_from_the_last_contact() -> None:
    base = leased(1, ago_s=12.5)
    gone = replace(base, ranks=(exited(base.ranks[0], code=1, at=NOW - 100), base.ranks[1]))
    assert ends_at(gone) == pytest.approx(NOW - 12 + LONGEST)


@pytest.mark.parametrize(
    "change",
    [{"lease": None}, {"ranks": ()}],
)
def test_a_generation_without_terms_or_word_of_its_pace_is_not_judged_by_a_short_limit(
    change: dict[str, object],
) -> None:
    found = ends_at(replace(one_stopped(), **change))  # type: ignore[arg-type]
    assert found is None or found == pytest.approx(NOW - 5 + SETUP)


def test_no_stopped_peer_no_lease_proof() -> None:
    assert ends_at(stopping(leased(1, ago_s=12.5))) is None


def test_a_stop_on_the_same_node_is_no_peers_stop() -> None:
    assert ends_at(proven(stopping(leased(1, ago_s=12.5)), "gpu-02", at=NOW - 5)) is None


@pytest.mark.parametrize("kind", [ProofKind.NEVER_STARTED, ProofKind.LEASE_EXPIRED])
def test_a_share_that_never_ran_or_is_only_counted_out_is_no_stopped_peer(kind: ProofKind) -> None:
    assert ends_at(proven(stopping(leased(1, ago_s=12.5)), "gpu-01", at=NOW - 5, kind=kind)) is None


def test_no_lease_where_ranks_step_alone_or_the_runner_keeps_none() -> None:
    assert ends_at(one_stopped(), synchronous=False) is None
    old_runner = one_stopped()
    old_runner = replace(old_runner, shares=tuple(replace(part, keeps_lease=False) for part in old_runner.shares))
    assert ends_at(old_runner) is None


def test_no_lease_where_it_is_not_known_what_could_have_renewed_it() -> None:
    assert ends_at(one_stopped(), heard_at_most=None) is None
    share = one_stopped().shares[1]
    assert lease_ends_at(share, one_stopped(), None, synchronous=True) is None


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_ranks_that_may_be_in_their_setup_have_its_limit(steps: int) -> None:
    view = one_stopped()
    young = replace(training(1, of=view.plan, last_step=steps), resumed_step=0)
    assert ends_at(replace(view, ranks=(view.ranks[0], young))) == pytest.approx(NOW - 5 + SETUP)


def test_every_rank_of_the_node_must_have_settled() -> None:
    view = one_stopped()
    two_per_node = replace(view.plan, ranks_per_node=2)
    assert ends_at(replace(view, plan=two_per_node)) == pytest.approx(NOW - 5 + SETUP)


def test_settled_counts_from_the_step_that_it_resumed_at() -> None:
    view = one_stopped()
    resumed = replace(view.ranks[1], resumed_step=49, last_step=50)
    assert ends_at(replace(view, ranks=(view.ranks[0], resumed))) == pytest.approx(NOW - 5 + SETUP)


def test_a_peers_stop_counts_from_when_the_server_heard_of_it_whatever_its_clock_says() -> None:
    base = leased(1, ago_s=12.5)
    early = replace(exited(base.ranks[0], code=1, at=NOW - 3600), exit_recorded_at=NOW - 2)
    assert peer_stopped_at(base.shares[1], replace(base, ranks=(early, base.ranks[1]))) == NOW - 2
    assert ends_at(replace(base, ranks=(early, base.ranks[1]))) == pytest.approx(NOW - 2 + LONGEST)


def test_a_rank_that_ended_well_elsewhere_is_a_stopped_peer() -> None:
    base = leased(1, ago_s=12.5)
    assert ends_at(replace(base, ranks=(ended_well(base.ranks[0]), base.ranks[1]))) is not None


def proof_at(view: GenerationView, now: float, **silent: object) -> object:
    seen = lost("gpu-02", **{"observed_until": now, **silent})  # type: ignore[arg-type]
    return lease_proof(view.shares[1], view, seen, synchronous=True, now=now)


def test_proof_comes_when_the_lease_has_run_out_and_not_a_moment_before() -> None:
    view = one_stopped()
    end = NOW - 5 + LONGEST
    assert proof_at(view, end - 0.01) is None
    proof = proof_at(view, end + 0.01)
    assert proof is not None
    assert (proof.kind, proof.node, proof.generation) == (ProofKind.LEASE_EXPIRED, "gpu-02", 1)  # type: ignore[attr-defined]
    assert proof.at == pytest.approx(end)  # type: ignore[attr-defined]
    assert "another node has been stopped" in proof.evidence  # type: ignore[attr-defined]


def test_no_proof_before_an_observer_has_written_down_that_it_heard_nothing_for_so_long() -> None:
    end = NOW - 5 + LONGEST
    assert proof_at(one_stopped(), end + 100, observed_until=end - 1) is None
    assert proof_at(one_stopped(), end + 100, observed_until=end + 1) is not None


def test_contact_that_comes_back_takes_the_proof_away() -> None:
    end = NOW - 5 + LONGEST
    assert proof_at(one_stopped(), end + 1, heard_at_most=end - 1) is None


def test_a_node_in_contact_never_has_a_lease_that_ran_out() -> None:
    view = one_stopped()
    assert lease_proof(view.shares[1], view, node("gpu-02"), synchronous=True, now=NOW) is None


def test_longest_limit_covers_every_phase_that_can_be_entered_without_a_peer() -> None:
    terms = LeaseLimits(setup_s=100, compile_s=200, step_s=15, save_s=40, evaluation_s=30)
    assert longest_limit_s(terms, settled=True) == 40
    assert longest_limit_s(terms, settled=False) == 200
    assert longest_limit_s(replace(terms, compile_s=50), settled=False) == 100


def test_terms_follow_the_pace_of_a_slow_job_in_steps_of_5_s_and_never_fall() -> None:
    assert raised(TERMS, pace_s=1.0) == TERMS
    assert raised(TERMS, pace_s=4.0).step_s == 35.0
    assert raised(TERMS, save_time_s=10.0).save_s == 40.0
    slow = raised(TERMS, pace_s=10.0, save_time_s=100.0)
    assert raised(slow, pace_s=0.1, save_time_s=0.1) == slow


limits = st.builds(
    LeaseLimits,
    setup_s=st.floats(1, 5000),
    compile_s=st.floats(1, 5000),
    step_s=st.floats(1, 500),
    save_s=st.floats(1, 500),
    evaluation_s=st.floats(1, 500),
)


@given(
    terms=limits,
    heard_ago=st.floats(0, 5000),
    stopped_ago=st.floats(0, 5000),
    steps=st.integers(0, 10),
    drift=st.floats(-0.01, 0.01),
    phase_s=st.sampled_from(["step_s", "save_s", "evaluation_s"]),
)
def test_the_server_never_counts_less_than_a_runner_whose_clock_is_off_by_a_hundredth(
    terms: LeaseLimits, heard_ago: float, stopped_ago: float, steps: int, drift: float, phase_s: str
) -> None:
    view = replace(one_stopped(at=NOW - stopped_ago), lease=terms)
    view = replace(view, ranks=(view.ranks[0], replace(view.ranks[1], resumed_step=40, last_step=40 + steps)))
    end = ends_at(view, heard_at=NOW - heard_ago)
    # The runner's limit by its own clock: that of the phase, or of the setup while steps are few.
    own_limit = getattr(terms, phase_s) if steps >= 3 else max(terms.setup_s, terms.compile_s)
    last_sign = max(NOW - heard_ago, NOW - stopped_ago)
    look_and_kill_s = 0.5
    assert end is not None
    assert end >= last_sign + own_limit / (1 + drift) + look_and_kill_s
