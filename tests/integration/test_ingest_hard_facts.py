"""Facts that are hard to store: values no database takes, clocks that are wrong, and sessions that end in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.db.models.signals import post_save

from agents.protocol.messages import RankExited, RankResumed, RankStarted, StepReport, StepReports
from recovery import engine, ingest, sessions
from recovery.models import Job, Node, RankRow, StepRow
from tests.fakes.told_fleet import OBSERVER, ToldFleet

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def fleet(job: Job) -> ToldFleet:
    fleet = ToldFleet.of(job.id, "gpu-01", "gpu-02")
    engine.advance_job(job.id)
    return fleet


def started(job: Job, pid: int) -> RankStarted:
    return RankStarted(job=job.id, generation=1, rank=0, pid=pid, at=time.time())


def test_fact_that_no_database_takes_is_left_out_and_the_others_are_stored(job: Job, fleet: ToldFleet) -> None:
    node = fleet.nodes["gpu-01"]
    resumed = RankResumed(job=job.id, generation=1, rank=0, step=2**63 + 1, at=time.time())
    node.tell(started(job, 7), resumed, RankExited(job=job.id, generation=1, rank=0, pid=7, at=1.0, exit_code=3))
    row = RankRow.objects.get()
    assert (row.pid, row.exit_code, row.resumed_step) == (7, 3, None)
    assert Node.objects.get(name="gpu-01").acknowledged_seq == 3


def test_nul_in_the_last_words_of_a_rank_is_replaced(job: Job, fleet: ToldFleet) -> None:
    words = "Error: \0\0 broken"
    fleet.nodes["gpu-01"].tell(RankExited(job=job.id, generation=1, rank=0, pid=7, at=1.0, exit_code=1, detail=words))
    assert RankRow.objects.get().detail == "Error: \ufffd\ufffd broken"


def test_numbers_that_are_not_finite_are_stored_as_unknown(job: Job, fleet: ToldFleet) -> None:
    nan = float("nan")
    step = StepReport(rank=0, step=1, at=nan, loss=nan, learning_rate=nan, grad_norm=nan, step_time_s=float("inf"))
    fleet.nodes["gpu-01"].tell(StepReports(job=job.id, generation=1, steps=[step]))
    row = StepRow.objects.get()
    assert (row.loss, row.loss_text, row.learning_rate, row.step_time_s) == (None, "nan", None, None)
    assert time.time() - row.at < 60


def test_clock_that_was_known_to_be_wrong_is_corrected_before_the_first_heartbeat(job: Job, fleet: ToldFleet) -> None:
    node = fleet.nodes["gpu-01"]
    Node.objects.filter(pk=node.row.pk).update(clock_offset_s=3600.0)
    death = RankExited(job=job.id, generation=1, rank=0, pid=7, at=time.time() - 3605.0, signal=9)
    ingest.store_facts(node.row.pk, [(1, death)], session=node.session, offset_s=None)
    assert 0 <= time.time() - (RankRow.objects.get().exited_at or 0) < 60


@pytest.fixture
def newer_session_meanwhile(fleet: ToldFleet) -> Iterator[None]:
    """A fresh outbox of the same node takes over once a rank's row has been written."""

    def take_over(**_: Any) -> None:
        Node.objects.filter(name="gpu-01").update(session="newer", outbox_id="fresh", acknowledged_seq=0)

    post_save.connect(take_over, sender=RankRow)
    yield
    post_save.disconnect(take_over, sender=RankRow)


@pytest.mark.usefixtures("newer_session_meanwhile")
def test_batch_is_undone_when_a_newer_session_takes_over_while_it_is_stored(job: Job, fleet: ToldFleet) -> None:
    node = fleet.nodes["gpu-01"]
    facts = [(1, started(job, 7)), (2, started(job, 8))]
    assert ingest.store_facts(node.row.pk, facts, session=node.session, offset_s=0.0) is None
    assert not RankRow.objects.exists()
    assert Node.objects.get(name="gpu-01").acknowledged_seq == 0


def test_unknown_offset_keeps_the_one_that_was_known(fleet: ToldFleet) -> None:
    pk = fleet.nodes["gpu-01"].row.pk
    for at, offset_s in ((1.0, 5.0), (2.0, None)):
        heard = sessions.Heard(
            node_id=pk, session=fleet.nodes["gpu-01"].session, at=at, offset_s=offset_s, seen_revision=1
        )
        assert sessions.record_heard([heard], observer=OBSERVER, since=0.0, at=at, lag_s=0.0) == {pk}
    assert Node.objects.get(pk=pk).clock_offset_s == 5.0
