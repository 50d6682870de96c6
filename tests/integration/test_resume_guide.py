"""The guide's own loop, killed and started again by torchrun as its reader would, and the guide's word for it."""

from __future__ import annotations

import difflib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from guide_blocks import ROOT, blocks
from launches import free_port, lines_of, wait_until

from everstep.checkpoint.manifest import CheckpointName, complete_checkpoints
from tests.integration.forked_generation import fork_script, warm_up

PLAIN, RECOVERABLE = ROOT / "examples" / "plain_loop.py", ROOT / "examples" / "recoverable_loop.py"
STEPS = 40


def loop_of(script: Path) -> str:
    text = script.read_text()
    return text[text.index("def main") : text.index("\n\n\nif __name__")] + "\n"


def test_guide_quotes_both_loops_as_they_are() -> None:
    assert blocks()["before"] == loop_of(PLAIN)
    assert blocks()["after"] == loop_of(RECOVERABLE)


def test_ten_lines_make_the_plain_loop_recoverable() -> None:
    plain, recoverable = ([line.strip() for line in loop_of(path).splitlines()] for path in (PLAIN, RECOVERABLE))
    new = [line[2:] for line in difflib.ndiff(plain, recoverable) if line.startswith("+ ") and line[2:]]
    assert 1 + len(new) == 10, ["import everstep", *new]


def started(directory: Path, log: str) -> subprocess.Popen[bytes]:
    """Two ranks under torchrun, in a directory of their own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(RECOVERABLE)],
        cwd=directory,
        env={
            **environment,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "STEPS": str(STEPS),
            "EVERSTEP_LOG_DIR": str(directory / log),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )


def run_whole(directory: Path, log: str) -> None:
    """In two ranks that are forked from here, with nothing that disturbs them."""
    warm_up()
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "STEPS": str(STEPS),
        "EVERSTEP_LOG_DIR": str(directory / log),
    }
    command = [sys.executable, str(RECOVERABLE)]
    ranks = [fork_script(command, {**shared, "RANK": str(rank)}, directory=directory) for rank in range(2)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def steps_of(directory: Path, log: str, rank: int) -> dict[int, tuple[Any, ...]]:
    lines = [line for line in lines_of(directory / log / f"rank-{rank}.jsonl") if line["kind"] == "step"]
    return {
        line["step"]: (line["loss_hex"], line["learning_rate"], line["span_start"], line["indices_digest"])
        for line in lines
    }


def state_hashes(directory: Path, generation: int) -> dict[str, str]:
    """SHA-256 of each tensor in the last checkpoint, whoever wrote it."""
    path = CheckpointName(generation=generation, step=STEPS).directory(directory / "checkpoints")
    return {
        chunk["key"]: chunk["sha256"]
        for rank in range(2)
        for chunk in json.loads((path / f"rank-{rank:05d}.json").read_bytes())["chunks"]
    }


def test_killed_and_started_again_it_ends_bit_for_bit_where_it_would_have(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    run_whole(tmp_path / "whole", "log")

    first = started(tmp_path / "cut", "first")
    wait_until(lambda: max(steps_of(tmp_path / "cut", "first", 1), default=0) > 27, limit_s=240)
    os.kill(lines_of(tmp_path / "cut" / "first" / "rank-1.jsonl")[0]["pid"], signal.SIGKILL)
    assert first.wait(timeout=120) != 0
    saved = [manifest.name.step for manifest in complete_checkpoints(tmp_path / "cut" / "checkpoints")]
    assert saved in ([0, 25], [0]), saved
    assert started(tmp_path / "cut", "second").wait(timeout=240) == 0

    for rank in range(2):
        whole = steps_of(tmp_path / "whole", "log", rank)
        resumed = steps_of(tmp_path / "cut", "second", rank)
        assert sorted(whole) == list(range(1, STEPS + 1))
        assert sorted(resumed) == list(range(saved[-1] + 1, STEPS + 1))
        assert resumed.items() <= whole.items()
    assert state_hashes(tmp_path / "cut", 2) == state_hashes(tmp_path / "whole", 1)
