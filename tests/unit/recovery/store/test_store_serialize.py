"""What is read from a row and written again says as much as a value that was made in memory."""

from __future__ import annotations

from recovery.domain.plan import CheckpointRef, LeaseLimits, RecoveryPlan
from recovery.store import from_json, to_json


def test_defaults_that_a_row_does_not_name_are_written_like_any_value() -> None:
    assert to_json(from_json({}, LeaseLimits)) == to_json(LeaseLimits())
    assert to_json(LeaseLimits())["step_s"] == 15.0


def test_defaults_inside_other_values_are_written_too() -> None:
    plan = RecoveryPlan(
        job="job-1",
        generation=2,
        plan_id="plan-2",
        run_id="run-2",
        nodes=("gpu-01",),
        ranks_per_node=1,
        master_address="10.0.0.1",
        parent=CheckpointRef(generation=1, step=20),
        parent_reason="newest",
        placement_reason="free",
        lease=LeaseLimits(),
    )
    row = to_json(plan)
    assert to_json(from_json({**row, "lease": {}}, RecoveryPlan)) == row
