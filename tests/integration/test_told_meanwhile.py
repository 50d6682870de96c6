"""What is told while something is being decided or stored: it is neither lost nor turned into a wrong conclusion."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from django.db import connection, transaction
from django.db.models import F

from agents.protocol.messages import ProofKind
from recovery import absence, engine, ingest
from recovery.checkpoints import _raise_integrity
from recovery.domain.generations import FenceProof
from recovery.domain.trust import Integrity
from recovery.incidents import open_or_join
from recovery.models import CheckpointRow, Claim, GenerationRow, IncidentRow, Job, RankRow, ShareRow, Stray
from recovery.proofs import keep_proof
from recovery.strays import settle_strays, stop_orders
from recovery.sweep import sweep
from tests.fakes.interleaving import happens_before
from tests.fakes.told_fleet import ToldFleet
from tests.integration.test_strays import come_back, says_it_runs, wait_60_s

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.job_trains]


def end(job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(state="stopped", ended_at=time.time(), version=F("version") + 1)


def test_generation_that_is_taken_over_while_an_order_is_made_is_not_ordered_to_stop(
    job: Job, fleet: ToldFleet
) -> None:
    for rank, name in enumerate(("gpu-01", "gpu-03")):
        come_back(fleet, job, name)
        says_it_runs(fleet, name, rank)
    with happens_before("SELECT", GenerationRow, sweep):
        orders = stop_orders(fleet.nodes["gpu-03"].row)
    assert GenerationRow.objects.filter(job=job, number=2, adopted=True).exists()
    assert orders == []


def test_node_that_tells_late_of_a_newer_generation_holds_the_job_again_and_voids_what_was_decided(
    job: Job, fleet: ToldFleet
) -> None:
    come_back(fleet, job, "gpu-03")
    wait_60_s(job)
    settle_strays(job.pk)  # all nodes are in contact, and none has told of a newer one yet
    job.refresh_from_db()
    assert job.behind_since is None
    says_it_runs(fleet, "gpu-03", 1)
    version = job.version
    job.refresh_from_db()
    assert job.behind_since is not None
    assert job.version > version
    assert Stray.objects.filter(job=job, number=2).exists()


def test_job_that_ends_while_a_fault_is_looked_for_opens_no_incident(job: Job, fleet: ToldFleet) -> None:
    def die_and_end() -> None:
        RankRow.objects.filter(rank=1).update(exited_at=time.time(), exit_recorded_at=time.time(), exit_code=1)
        end(job)

    with happens_before("SELECT", GenerationRow, die_and_end):
        engine.advance_job(job.id)
    job.refresh_from_db()
    assert (job.state, IncidentRow.objects.count()) == ("stopped", 0)


def test_death_that_is_told_as_the_job_ends_opens_no_incident(job: Job, fleet: ToldFleet) -> None:
    stale = Job.objects.get(pk=job.pk)
    end(job)
    with transaction.atomic():
        assert open_or_join(stale, generation=1, rank=1, sentence="Rank 1 is gone.", fault_at=time.time()) is None
    assert not IncidentRow.objects.exists()


def test_terms_of_a_lease_never_fall_when_two_nodes_raise_them_at_once(job: Job, fleet: ToldFleet) -> None:
    one, other = (GenerationRow.objects.get(job=job, number=1) for _ in range(2))
    with transaction.atomic():
        ingest._raise_lease(one, save_time_s=60.0)
    with transaction.atomic():
        ingest._raise_lease(other, pace_s=9.0)
    lease = GenerationRow.objects.get(job=job, number=1).lease
    assert lease is not None and one.lease is not None
    assert lease["save_s"] == one.lease["save_s"] > 60.0
    assert lease["step_s"] > one.lease["step_s"]


def test_lease_that_was_given_up_meanwhile_stays_given_up(job: Job, fleet: ToldFleet) -> None:
    stale = GenerationRow.objects.get(job=job, number=1)
    GenerationRow.objects.filter(pk=stale.pk).update(lease=None)
    with transaction.atomic():
        ingest._raise_lease(stale, pace_s=9.0)
    assert GenerationRow.objects.get(pk=stale.pk).lease is None


def test_end_of_a_rank_that_a_proof_told_meanwhile_is_not_taken_back(job: Job, fleet: ToldFleet) -> None:
    def proven() -> None:
        RankRow.objects.filter(rank=1).update(exited_at=time.time(), exit_recorded_at=time.time())

    with happens_before("UPDATE", RankRow, proven):
        fleet.start("gpu-02", 1, 1)
    assert RankRow.objects.get(rank=1).exited_at is not None


def test_damage_that_another_node_has_found_meanwhile_stays(job: Job, fleet: ToldFleet) -> None:
    stale = CheckpointRow.objects.get(job=job, step=20)
    CheckpointRow.objects.filter(pk=stale.pk).update(integrity=Integrity.DAMAGED.value, integrity_reason="flipped")
    _raise_integrity(stale, Integrity.REHASHED, "", time.time())
    row = CheckpointRow.objects.get(pk=stale.pk)
    assert (row.integrity, row.integrity_reason) == (Integrity.DAMAGED.value, "flipped")


def test_newest_step_of_a_job_does_not_fall_back_between_nodes(job: Job, fleet: ToldFleet) -> None:
    fleet.train("gpu-01", 1, 0, range(31, 41))
    fleet.train("gpu-02", 1, 1, range(31, 36))
    assert Job.objects.get(pk=job.pk).last_step == 40


def test_generation_is_called_fenced_when_its_nodes_prove_at_once(job: Job, fleet: ToldFleet) -> None:
    first, second = (
        ShareRow.objects.filter(generation__job=job).order_by("node_rank").select_related("generation", "node")
    )

    def prove(share: ShareRow) -> None:
        proof = FenceProof(
            node=share.node.name, kind=ProofKind.CGROUP_EMPTY, at=time.time(), evidence="populated 0",
            generation=1, recorded_at=time.time(),
        )  # fmt: skip
        assert keep_proof(share, proof)

    with at_once(lambda: prove(second)):
        prove(first)
    assert GenerationRow.objects.get(job=job, number=1).fenced_at is not None


def test_deadline_is_moved_though_a_fact_comes_in_at_that_moment(job: Job, fleet: ToldFleet) -> None:
    fleet.die("gpu-02", 1, 1)
    before = IncidentRow.objects.get(job=job).deadline_at
    now = time.time()
    Claim.objects.update_or_create(name="presence", defaults={"holder": "", "until": 0.0, "last_done_at": now - 300.0})

    def fact() -> None:
        IncidentRow.objects.update(version=F("version") + 1)

    with happens_before("UPDATE", IncidentRow, fact):
        absence.note_presence()
    after = IncidentRow.objects.get(job=job).deadline_at
    assert before is not None and after is not None and after > before + 299.0


@contextlib.contextmanager
def at_once(work: Callable[[], object]) -> Iterator[None]:
    """Another connection begins what it has to do while the block's transaction is open, and ends it after that."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with transaction.atomic():
                work()
        except BaseException as err:
            errors.append(err)
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    with transaction.atomic():
        yield
        thread.start()
        thread.join(1.0)
    thread.join()
    assert errors == []
