"""`import everstep` must stay light: the CLI, the runner and the agent import parts of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import everstep


@pytest.mark.parametrize(
    "statement",
    [
        "import everstep",
        "from everstep import ReplayableSampler",
        "import everstep.telemetry, everstep.elastic.runner",
        "import everstep.cli.checkpoints, everstep.checkpoint.writer_process",
    ],
)
def test_import_loads_neither_torch_nor_django(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint([m for m in ('torch', 'numpy', 'django', 'msgspec') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_export_exists() -> None:
    assert all(getattr(everstep, name) for name in everstep.__all__)


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="ReplayableSampler"):
        _ = everstep.Sampler  # type: ignore[attr-defined]
