"""Silent nodes that are called off or switched off: who may, when, and what follows, told without processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents.protocol.messages import AssignmentPhase, SeenPhase
from recovery import fencing, jobs, queries
from recovery.errors import FenceRefused, NotConfirmed, NotFound
from recovery.models import FenceAction, GenerationRow, IncidentRow, Job, Node, RankRow, ShareRow, TimelineEntry
from recovery.orders import order_for
from recovery.store.timelines import first_broken_link
from recovery.sweep import sweep
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_recovery_pipeline import SPEC, advance, run_generation, running

pytestmark = pytest.mark.django_db


@pytest.fixture
def job() -> Job:
    return jobs.submit_job({**SPEC, "nodes": 1}, owner="tests")


@pytest.fixture
def silent(fleet: ToldFleet, job: Job) -> ToldFleet:
    """The one node of the job has been silent for so long that its incident waits for a fence."""
    running(fleet, job)
    fleet.fall_silent("gpu-01", for_s=45)
    advance(job)
    advance(job)
    assert IncidentRow.objects.get(job=job).state == "waiting_for_fence"
    return fleet


Script = Callable[[str], None]


@pytest.fixture
def provider(settings: Any, tmp_path: Path) -> Script:
    """Sets what the fence command does; each run leaves a line in `asked`."""

    def set_body(body: str) -> None:
        path = tmp_path / "fence"
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{body}\n')
        path.chmod(0o755)
        settings.EVERSTEP_FENCE_COMMAND = [str(path), "{node}"]
        settings.EVERSTEP_FENCE_TIMEOUT_S = 20.0

    return set_body


def asked(tmp_path: Path) -> list[str]:
    path = tmp_path / "asked"
    return path.read_text().splitlines() if path.exists() else []


def story() -> list[tuple[str, str]]:
    return list(TimelineEntry.objects.order_by("seq").values_list("kind", "text"))


def pass_back_off() -> None:
    FenceAction.objects.filter(state="requested").update(ended_at=time.time() - 3600)


def attest(name: str = "gpu-01", **changes: str) -> FenceAction:
    given = {"confirm": name, "statement": "pulled the plug", "by": "alice", **changes}
    return fencing.attest_power_off(name, **given)


# --- The told way -------------------------------------------------------------------------------------------------


def test_single_node_job_on_a_silent_node_waits_visibly_and_goes_on_by_an_attestation(
    silent: ToldFleet, job: Job
) -> None:
    row = GenerationRow.objects.get(job=job)
    assert row.wanted == AssignmentPhase.RUN.value, "nothing is stopped: it may train"
    incident = queries.get_incident(IncidentRow.objects.get(job=job).pk)
    (waiting,) = incident.waiting_for
    assert (incident.needs_human, waiting.node, waiting.generation) == (True, "gpu-01", 1)
    assert [kind.value for kind in waiting.helps] == ["return", "attestation"]
    assert (waiting.lease_ends_at, waiting.contact.value) == (None, "lost")
    assert ("page", "Paged the operators: ") in [(kind, text[:21]) for kind, text in story()]
    silent.beat()
    advance(job)
    assert GenerationRow.objects.filter(job=job).count() == 1, "nothing is relaunched before there is a proof"

    action = attest()
    assert (action.kind, action.state, action.requested_by) == ("attestation", "fenced", "alice")
    proof = ShareRow.objects.get().proof
    assert (proof["kind"], proof["generation"]) == ("attestation", 1)
    assert proof["evidence"].startswith("alice attested at 20")
    assert proof["evidence"].endswith("that gpu-01 is powered off: 'pulled the plug'")
    assert ("operator", "alice attests that gpu-01 is powered off: pulled the plug") in story()
    advance(job)
    advance(job)
    new = run_generation(silent, job, 2)
    assert new.plan["nodes"] == ["gpu-02"]
    assert [(one["node"], one["kind"]) for one in new.plan["fences"]] == [("gpu-01", "attestation")]
    shown = queries.get_incident(incident.id)
    assert [(one.node, one.kind, one.confirmed) for one in shown.fences] == [("gpu-01", "attestation", False)]
    assert first_broken_link(incident.id) is None


def test_node_that_was_attested_off_is_told_to_stop_until_its_own_agent_has(silent: ToldFleet, job: Job) -> None:
    row = GenerationRow.objects.get(job=job)
    attest()
    advance(job)
    told = order_for(silent.nodes["gpu-01"].row.pk).assignments
    assert [(one.generation, one.phase) for one in told] == [(1, AssignmentPhase.STOP)]
    silent.connect("gpu-01", boot="boot-after")
    silent.beat()
    node = queries.get_node("gpu-01")
    assert (node.state.value, [one.generation for one in node.unconfirmed]) == ("held", [1])
    assert "generation 1 of tiny is gone" in node.reason
    silent.report("gpu-01", 1, row.plan_id, SeenPhase.STOPPED)
    assert order_for(silent.nodes["gpu-01"].row.pk).assignments == []
    assert queries.get_node("gpu-01").unconfirmed == ()


# --- Who may attest, and when -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("silent_s", "words"), [(None, "gpu-01 is in contact"), (5.0, "does not count as lost yet: wait a few seconds")]
)
def test_attestation_is_refused_for_a_node_in_contact(
    fleet: ToldFleet, job: Job, silent_s: float | None, words: str
) -> None:
    running(fleet, job)
    if silent_s is not None:
        fleet.fall_silent("gpu-01", for_s=silent_s)
    fleet.beat()
    with pytest.raises(FenceRefused, match=words):
        attest()
    assert not FenceAction.objects.exists()
    assert ShareRow.objects.get().proof is None


def test_attestation_is_refused_while_nobody_listens(silent: ToldFleet) -> None:
    silent.forget_observers()
    with pytest.raises(FenceRefused, match="not known: no web process has listened"):
        attest()


def test_attestation_is_refused_for_a_node_of_which_nothing_waits_for_a_proof(silent: ToldFleet) -> None:
    silent.fall_silent("gpu-03", for_s=45)
    with pytest.raises(FenceRefused, match="Nothing waits for a proof of gpu-03"):
        attest("gpu-03")
    attest()
    with pytest.raises(FenceRefused, match="Nothing waits for a proof of gpu-01"):
        attest()


def test_nobody_calls_a_node_off_whose_job_is_known_to_train_on() -> None:
    job = jobs.submit_job(SPEC, owner="tests")
    fleet = ToldFleet.of(job.id, "gpu-01", "gpu-02", "gpu-03")
    running(fleet, job)
    fleet.fall_silent("gpu-02", for_s=45)
    seen = {"phase": "step", "progress_at": time.time(), "progress_seen_at": time.time()}
    RankRow.objects.filter(generation__job=job, node__name="gpu-01").update(**seen)
    with pytest.raises(FenceRefused, match="trains on"):
        attest("gpu-02")
    RankRow.objects.filter(generation__job=job).update(progress_seen_at=time.time() - 60)
    assert attest("gpu-02").state == "fenced"


@pytest.mark.parametrize("confirm", ["", "gpu-02", "GPU-01", "gpu-01 ", "yes"])
def test_attestation_is_refused_if_the_name_is_not_typed_to_the_letter(silent: ToldFleet, confirm: str) -> None:
    with pytest.raises(NotConfirmed, match="exact name, gpu-01"):
        attest(confirm=confirm)
    assert not FenceAction.objects.exists()


def test_unknown_node_is_not_found() -> None:
    with pytest.raises(NotFound, match="no node gpu-99"):
        attest("gpu-99")


def test_revoked_node_is_in_contact_for_as_long_as_it_is_heard(silent: ToldFleet, job: Job) -> None:
    Node.objects.filter(name="gpu-01").update(revoked=True, last_heard_at=time.time())
    silent.silent.discard("gpu-01")
    silent.beat()
    with pytest.raises(FenceRefused, match="is in contact"):
        attest()


def test_node_that_is_heard_again_in_the_same_boot_contradicts_its_attestation(silent: ToldFleet, job: Job) -> None:
    attest()
    silent.connect("gpu-01")
    action = FenceAction.objects.get()
    assert action.contradicted_at is not None
    node = queries.get_node("gpu-01")
    assert node.quarantine_reason == "alice attested that it is off, but it was heard again in the same boot"
    assert node.fence_actions[0].contradicted_at is not None
    assert any("is not used before it reboots" in text for _, text in story())
    silent.connect("gpu-01", boot="boot-after")
    assert queries.get_node("gpu-01").quarantine_reason == ""


def test_contradiction_is_seen_though_the_connection_outlived_the_silence(silent: ToldFleet, job: Job) -> None:
    attest()
    sweep()
    assert FenceAction.objects.get().contradicted_at is None
    silent.silent.discard("gpu-01")
    silent.beat()  # heartbeats on the old connection: no hello says so
    sweep()
    assert FenceAction.objects.get().contradicted_at is not None
    assert "same boot" in Node.objects.get(name="gpu-01").quarantine_reason


# --- The provider -------------------------------------------------------------------------------------------------


def test_provider_that_says_off_is_a_proof_and_the_job_goes_on(
    silent: ToldFleet, job: Job, provider: Script, tmp_path: Path
) -> None:
    provider("echo off")
    assert [one.value for one in queries.get_incident(IncidentRow.objects.get().pk).waiting_for[0].helps] == [
        "return", "provider", "attestation",
    ]  # fmt: skip
    action = fencing.request_fence("gpu-01", confirm="gpu-01", by="alice")
    assert (action.state, asked(tmp_path)) == ("requested", [])
    fencing.drive_fence_action(action.pk)
    action.refresh_from_db()
    assert (action.state, action.attempts, asked(tmp_path)) == ("fenced", 1, ["gpu-01 off"])
    proof = ShareRow.objects.get().proof
    assert proof["kind"] == "provider"
    assert "gpu-01 off` ended with code 0; the last line of its output was 'off'" in proof["evidence"]
    assert [text for kind, text in story() if kind in ("operator", "order")][-2:] == [
        "alice asked the fence provider (command) to switch gpu-01 off.",
        "Asking the fence provider to switch gpu-01 off, attempt 1 of 3.",
    ]
    advance(job)
    advance(job)
    assert run_generation(silent, job, 2).plan["nodes"] == ["gpu-02"]
    fencing.drive_fence_action(action.pk)
    assert asked(tmp_path) == ["gpu-01 off"], "what has ended is not done again"


def test_provider_is_asked_again_with_pauses_and_then_fails_and_pages(
    silent: ToldFleet, provider: Script, tmp_path: Path
) -> None:
    provider("echo on")
    action = fencing.request_fence("gpu-01", confirm="gpu-01", by="alice")
    fencing.drive_fence_action(action.pk)
    fencing.drive_fence_action(action.pk)
    assert len(asked(tmp_path)) == 1, "the second attempt waits"
    for attempts in (2, 3):
        pass_back_off()
        silent.beat()
        fencing.drive_fence_action(action.pk)
        assert len(asked(tmp_path)) == attempts
    action.refresh_from_db()
    assert (action.state, action.attempts) == ("failed", 3)
    assert "'on'" in action.evidence
    pages = [text for kind, text in story() if kind == "page"]
    assert "could not switch gpu-01 off in 3 attempts" in pages[-1]
    assert ShareRow.objects.get().proof is None
    pass_back_off()
    fencing.drive_fence_action(action.pk)
    assert len(asked(tmp_path)) == 3
    assert fencing.request_fence("gpu-01", confirm="gpu-01", by="alice").state == "requested", "a person may ask anew"


def test_node_that_came_back_is_not_switched_off(silent: ToldFleet, provider: Script, tmp_path: Path) -> None:
    provider("echo off")
    action = fencing.request_fence("gpu-01", confirm="gpu-01", by="alice")
    silent.connect("gpu-01")
    silent.beat()
    fencing.drive_fence_action(action.pk)
    action.refresh_from_db()
    assert (action.state, asked(tmp_path)) == ("cancelled", [])
    assert "in contact again" in action.evidence
    assert ShareRow.objects.get().proof is None
    assert Node.objects.get(name="gpu-01").quarantined_boot_id == ""


def test_node_is_not_switched_off_while_nobody_listens(silent: ToldFleet, provider: Script, tmp_path: Path) -> None:
    provider("echo off")
    action = fencing.request_fence("gpu-01", confirm="gpu-01", by="alice")
    silent.forget_observers()
    fencing.drive_fence_action(action.pk)
    action.refresh_from_db()
    assert (action.state, action.attempts, asked(tmp_path)) == ("requested", 0, [])
    silent.beat()
    fencing.drive_fence_action(action.pk)
    assert asked(tmp_path) == ["gpu-01 off"]


def test_word_of_a_provider_counts_for_nothing_if_the_node_was_heard_meanwhile(
    silent: ToldFleet, provider: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider("echo off")
    action = fencing.request_fence("gpu-01", confirm="gpu-01", by="alice")
    claimed = fencing._claim(action.pk, fencing.configured_provider())
    assert claimed is not None
    heard_before = claimed.node.last_heard_at
    silent.connect("gpu-01")
    fencing._keep_result(claimed, fencing.FenceResult(off=True, evidence="off"), heard_before=heard_before)
    action.refresh_from_db()
    assert (action.state, ShareRow.objects.get().proof) == ("cancelled", None)


def test_run_whose_worker_died_is_taken_up_again_but_not_before_its_time(
    silent: ToldFleet, provider: Script, tmp_path: Path
) -> None:
    provider("echo off")
    action = fencing.request_fence("gpu-01", confirm="gpu-01", by="alice")
    assert fencing._claim(action.pk, fencing.configured_provider()) is not None  # and the worker dies here
    fencing.drive_fence_action(action.pk)
    assert asked(tmp_path) == [], "never two at once"
    FenceAction.objects.update(started_at=time.time() - 36.0)
    fencing.drive_fence_action(action.pk)
    action.refresh_from_db()
    assert (action.state, action.attempts, asked(tmp_path)) == ("fenced", 2, ["gpu-01 off"])


def test_late_word_of_a_worker_that_was_taken_for_dead_changes_nothing(silent: ToldFleet, provider: Script) -> None:
    provider("echo on")
    action = fencing.request_fence("gpu-01", confirm="gpu-01", by="alice")
    late = fencing._claim(action.pk, fencing.configured_provider())
    assert late is not None
    FenceAction.objects.update(started_at=time.time() - 36.0)
    assert fencing._claim(action.pk, fencing.configured_provider()) is not None
    word = fencing.FenceResult(off=True, evidence="off")
    fencing._keep_result(late, word, heard_before=late.node.last_heard_at)
    action.refresh_from_db()
    assert (action.state, action.attempts, ShareRow.objects.get().proof) == ("running", 2, None)


def test_third_run_that_kills_its_worker_is_the_last(silent: ToldFleet, provider: Script) -> None:
    provider("echo off")
    action = fencing.request_fence("gpu-01", confirm="gpu-01", by="alice")
    for _ in range(3):
        assert fencing._claim(action.pk, fencing.configured_provider()) is not None
        FenceAction.objects.update(started_at=time.time() - 36.0)
    fencing.drive_fence_action(action.pk)
    action.refresh_from_db()
    assert (action.state, action.attempts) == ("failed", 3)
    assert "worker died" in action.evidence


def test_provider_is_not_asked_twice_for_one_node(silent: ToldFleet, provider: Script) -> None:
    provider("echo off")
    fencing.request_fence("gpu-01", confirm="gpu-01", by="alice")
    with pytest.raises(FenceRefused, match="being fenced already"):
        fencing.request_fence("gpu-01", confirm="gpu-01", by="bob")
    assert FenceAction.objects.count() == 1


def test_proof_from_elsewhere_ends_a_fence_that_was_asked_for(
    silent: ToldFleet, provider: Script, tmp_path: Path
) -> None:
    provider("echo off")
    action = fencing.request_fence("gpu-01", confirm="gpu-01", by="alice")
    attest()
    fencing.drive_fence_action(action.pk)
    action.refresh_from_db()
    assert (action.state, asked(tmp_path)) == ("cancelled", [])


def test_without_a_provider_it_is_said_what_to_do(silent: ToldFleet, settings: Any) -> None:
    settings.EVERSTEP_FENCE_COMMAND = []
    with pytest.raises(FenceRefused, match=r"EVERSTEP_FENCE_COMMAND.*attest"):
        fencing.request_fence("gpu-01", confirm="gpu-01", by="alice")


@pytest.mark.django_db(transaction=True)  # another thread looks
def test_sweep_drives_what_was_asked_for_without_waiting_for_it(
    silent: ToldFleet, provider: Script, tmp_path: Path
) -> None:
    provider("echo off")
    action = fencing.request_fence("gpu-01", confirm="gpu-01", by="alice")
    thread = fencing.redrive(action.pk)
    assert thread is not None
    thread.join(30)
    action.refresh_from_db()
    assert (action.state, asked(tmp_path)) == ("fenced", ["gpu-01 off"])
    assert fencing.redrive(action.pk) is None


# --- Unasked ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lost_node(provider: Script, settings: Any) -> tuple[Job, ToldFleet]:
    """A job on two nodes; one is silent, and the rank on the other one died of it."""
    provider("echo off")
    settings.EVERSTEP_FENCE_AUTO = True
    job = jobs.submit_job(SPEC, owner="tests")
    fleet = ToldFleet.of(job.id, "gpu-01", "gpu-02", "gpu-03", "gpu-04")
    running(fleet, job)
    fleet.fall_silent("gpu-02", for_s=12)
    fleet.die("gpu-01", 1, 0, signal=None, exit_code=1, detail="Connection closed by peer [10.0.0.2]:4711")
    advance(job)
    return job, fleet


def test_lost_node_is_switched_off_unasked_where_the_site_wants_it(
    lost_node: tuple[Job, ToldFleet], tmp_path: Path
) -> None:
    job, _ = lost_node
    incident = IncidentRow.objects.get(job=job)
    assert (incident.state, incident.body["cause"]["kind"]) == ("stopping", "node_lost")
    fencing.look_after_fences()
    fencing.look_after_fences()
    action = FenceAction.objects.get()
    assert (action.node.name, action.requested_by) == ("gpu-02", "everstep")
    fencing.drive_fence_action(action.pk)
    assert asked(tmp_path) == ["gpu-02 off"]
    assert ShareRow.objects.get(node__name="gpu-02").proof["kind"] == "provider"
    fencing.look_after_fences()
    assert FenceAction.objects.count() == 1


def test_nothing_is_switched_off_unasked_unless_the_site_wants_it(
    lost_node: tuple[Job, ToldFleet], settings: Any
) -> None:
    settings.EVERSTEP_FENCE_AUTO = False
    fencing.look_after_fences()
    assert not FenceAction.objects.exists()


def test_silent_node_that_nobody_else_misses_is_never_switched_off_unasked(
    silent: ToldFleet, provider: Script, settings: Any
) -> None:
    provider("echo off")
    settings.EVERSTEP_FENCE_AUTO = True
    fencing.look_after_fences()
    assert not FenceAction.objects.exists()


def test_fence_that_failed_is_not_asked_for_unasked_once_more(lost_node: tuple[Job, ToldFleet]) -> None:
    fencing.look_after_fences()
    FenceAction.objects.update(state="failed", ended_at=time.time())
    fencing.look_after_fences()
    assert FenceAction.objects.count() == 1
