"""How fast a run may write: the script's word, overridden by the environment's."""

from __future__ import annotations

import pytest

from everstep.errors import UsageError
from everstep.save_rate import SAVE_BYTES_PER_S, save_rate


@pytest.mark.parametrize(
    ("wanted", "said", "rate"),
    [
        (None, "", None),
        (5e8, "", 5e8),
        (5e8, "2e9", 2e9),
        (None, "1000000", 1e6),
        (5e8, "unlimited", None),
    ],
)
def test_environment_overrides_the_script(wanted: float | None, said: str, rate: float | None) -> None:
    assert save_rate(wanted, environment={SAVE_BYTES_PER_S: said}) == rate


@pytest.mark.parametrize("wanted", [0, -1.0, float("nan"), float("inf"), "fast"])
def test_refuses_what_is_no_rate_and_names_the_argument(wanted: object) -> None:
    with pytest.raises(UsageError, match=r"Run\(save_bytes_per_s="):
        save_rate(wanted, environment={})  # type: ignore[arg-type]


def test_refuses_what_is_no_rate_and_names_the_variable() -> None:
    with pytest.raises(UsageError, match="EVERSTEP_SAVE_BYTES_PER_S='2 GB'"):
        save_rate(1e9, environment={SAVE_BYTES_PER_S: "2 GB"})
