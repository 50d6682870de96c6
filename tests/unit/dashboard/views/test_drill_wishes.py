"""What the form of a drill asks for, as the view reads it."""

from __future__ import annotations

from typing import Any

import pytest

from dashboard.views.drills import GO, _hit, _wish
from recovery.domain.drill_kinds import KINDS
from recovery.queries import JobSummary


def job(*nodes: str, ranks_per_node: int = 1) -> JobSummary:
    values: dict[str, Any] = dict.fromkeys(JobSummary.__dataclass_fields__)
    return JobSummary(**values | {"nodes": nodes, "ranks_per_node": ranks_per_node})


def test_every_kind_of_drill_says_on_its_last_button_what_it_does() -> None:
    assert set(GO) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_duration_is_that_of_the_kind_unless_another_is_typed(kind: str) -> None:
    usual = int(KINDS[kind].duration_s)
    assert _wish({"kind": kind}, None).duration_s == usual
    typed = _wish({"kind": kind, "fields_of": kind, "duration_s": "41"}, None)
    assert typed.duration_s == (41 if KINDS[kind].lasts else 0)


def test_duration_typed_for_another_kind_is_dropped() -> None:
    wish = _wish({"kind": "partition", "fields_of": "kill-agent", "duration_s": "90"}, None)
    assert wish.duration_s == KINDS["partition"].duration_s


def test_node_of_another_job_is_replaced_by_the_chosen_jobs_last() -> None:
    assert _wish({"kind": "freeze-node", "node": "gpu-09"}, job("gpu-01", "gpu-02")).node == "gpu-02"
    assert _wish({"kind": "freeze-node", "node": "gpu-01"}, job("gpu-01", "gpu-02")).node == "gpu-01"


def test_preview_names_the_node_that_is_hit_and_its_ranks() -> None:
    chosen = job("gpu-01", "gpu-02", ranks_per_node=2)
    node = _wish({"kind": "kill-agent", "node": "gpu-02"}, chosen)
    assert _hit(node, chosen) == {"node": "gpu-02", "ranks": [2, 3]}
    rank = _wish({"kind": "kill-rank", "rank": "1"}, chosen)
    assert _hit(rank, chosen) == {"node": "gpu-01", "ranks": [0, 1]}


def test_preview_names_no_node_where_the_server_is_hit_or_the_rank_is_not_placed() -> None:
    chosen = job("gpu-01")
    assert _hit(_wish({"kind": "server-down"}, chosen), chosen) is None
    assert _hit(_wish({"kind": "kill-rank", "rank": "7"}, chosen), chosen) is None
