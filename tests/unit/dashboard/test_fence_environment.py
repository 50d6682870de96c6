"""What the environment may say of the fence provider."""

from __future__ import annotations

import pytest

from dashboard.env import Environment


def test_fence_command_is_a_json_list_of_texts() -> None:
    assert Environment({}).fence_command == []
    assert Environment({"EVERSTEP_FENCE_COMMAND": " "}).fence_command == []
    given = '["/usr/bin/fence", "--host", "{address}"]'
    assert Environment({"EVERSTEP_FENCE_COMMAND": given}).fence_command == ["/usr/bin/fence", "--host", "{address}"]


@pytest.mark.parametrize("text", ["/usr/bin/fence {node}", '"fence"', "[]", '["fence", 1]', '["fence", ""]', "{}"])
def test_fence_command_of_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r'EVERSTEP_FENCE_COMMAND must be a JSON list .* \["/usr/local/bin/fence"'):
        _ = Environment({"EVERSTEP_FENCE_COMMAND": text}).fence_command


@pytest.mark.parametrize("text", ["0", "-1", "241", "nan"])
def test_limit_of_the_fence_command_is_short_enough_for_its_task(text: str) -> None:
    assert Environment({}).fence_timeout_s == 60.0
    with pytest.raises(ValueError, match="EVERSTEP_FENCE_TIMEOUT_S"):
        _ = Environment({"EVERSTEP_FENCE_TIMEOUT_S": text}).fence_timeout_s


def test_nothing_is_switched_off_unasked_unless_that_is_wanted() -> None:
    assert not Environment({}).fence_auto
    assert Environment({"EVERSTEP_FENCE_AUTO": "1"}).fence_auto
