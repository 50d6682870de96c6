"""Which form of `launch.json` is written for which runner."""

from __future__ import annotations

import pytest

from agents.errors import CheckFailed
from agents.supervisor.launch_file import choose_protocol


@pytest.mark.parametrize(("theirs", "chosen"), [(range(1, 2), 1), (range(1, 3), 2), (range(2, 3), 2), (range(2, 9), 2)])
def test_the_newest_that_both_know(theirs: range, chosen: int) -> None:
    assert choose_protocol(theirs, interpreter="/python") == chosen


@pytest.mark.parametrize("theirs", [range(3, 5), range(0)])
def test_nothing_in_common_is_refused_with_what_to_do(theirs: range) -> None:
    with pytest.raises(CheckFailed, match="Install an everstep of the agent's release") as caught:
        choose_protocol(theirs, interpreter="/python")
    assert caught.value.reason == "runner"
