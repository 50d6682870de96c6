"""Specs that could not be sent to a node are refused at the door: they would keep every order from it, also to stop."""

from __future__ import annotations

import pytest

from agents.protocol.version import MAX_FRAME_BYTES
from recovery.errors import JobRefused
from recovery.jobs import MAX_SPEC_BYTES, capture_spec
from tests.integration.test_recovery_pipeline import SPEC


def test_refuses_a_character_that_is_half_of_a_pair() -> None:
    with pytest.raises(JobRefused, match="half of a pair"):
        capture_spec({**SPEC, "argv": ["/usr/bin/python3", "train-\ud800.py"]})


def test_refuses_a_spec_of_which_a_few_would_not_fit_into_one_frame() -> None:
    assert MAX_SPEC_BYTES * 12 < MAX_FRAME_BYTES
    with pytest.raises(JobRefused, match="in a file that every node sees"):
        capture_spec({**SPEC, "environment": {f"NAME_{number}": "x" * 4000 for number in range(20)}})


def test_refuses_more_steps_than_a_column_holds() -> None:
    assert capture_spec({**SPEC, "total_steps": 2**31 - 1})["total_steps"] == 2**31 - 1
    with pytest.raises(JobRefused, match="total_steps"):
        capture_spec({**SPEC, "total_steps": 2**31})
