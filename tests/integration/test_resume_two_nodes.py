"""Two runners, one rank each, on this machine: kill one rank, resume, and compare with a run that nobody disturbed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from launches import Generation, free_port, has_ended, lines_of, wait_until

from everstep.checkpoint.manifest import complete_checkpoints
from tests.integration.forked_generation import fork_script, warm_up

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_gpt.py"
STEPS, SAVE_EVERY = 52, 20
COMMAND = [sys.executable, str(EXAMPLE), "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--device", "cpu"]
COMMAND += ["--batch", "4", "--step-time", "0.02"]


def steps_of(log: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    return {
        line["step"]: (line["loss_hex"], line["learning_rate"], line["grad_norm"], line["epoch"], line["span_start"])
        for line in log
        if line["kind"] == "step"
    }


def last_step(generation: Generation, rank: int) -> int:
    return max(steps_of(generation.log(rank)), default=0)


def run_undisturbed(root: Path) -> list[list[dict[str, Any]]]:
    """The same script in two forked ranks and without a runner; returns each rank's log."""
    root.mkdir()
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "EVERSTEP_LOG_DIR": str(root),
        "EVERSTEP_CHECKPOINT_DIR": str(root / "checkpoints"),
    }
    warm_up()
    ranks = [
        fork_script([*COMMAND, "--step-time", "0"], {**shared, "RANK": str(rank), "LOCAL_RANK": "0"}, directory=root)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [lines_of(root / f"rank-{rank}.jsonl") for rank in range(2)]


def test_killed_rank_is_reported_at_once_and_the_next_generation_is_bit_equal_to_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    with Generation(tmp_path, COMMAND, environment={"EVERSTEP_BEATS": "1"}) as first:
        datagrams: list[dict[str, Any]] = []

        def both_are_past_their_save() -> bool:
            datagrams.extend(first.datagrams())
            return all(last_step(first, rank) >= SAVE_EVERY + 5 for rank in range(2))

        wait_until(both_are_past_their_save, limit_s=120)
        victim = first.wait_event(1, "rank_started")["pid"]
        killed_at = time.time()
        os.kill(victim, signal.SIGKILL)
        event = first.wait_event(1, "rank_exited", limit_s=5)
        assert (event["rank"], event["pid"], event["signal"], event["exit_code"]) == (1, victim, signal.SIGKILL, None)
        assert event["at"] - killed_at < 1.0
        for node, runner in enumerate(first.runners):
            assert runner.wait(timeout=30) == 1
            assert first.wait_event(node, "runner_ended")["reason"] == "rank_failed"
        assert has_ended(first.wait_event(0, "rank_started")["pid"], limit_s=0)
        kinds = [datagram["kind"] for datagram in datagrams]
        assert {"poke", "resumed", "phase", "step", "saved"} <= set(kinds)
        beats = (first.directories[1] / "logs" / "rank-1.beats").read_text().split()
        assert len(beats) > 20 and abs(float(beats[-1]) - killed_at) < 1.0
        lost = [steps_of(first.log(rank)) for rank in range(2)]

    with Generation(tmp_path, COMMAND, number=2, parent=(1, SAVE_EVERY)) as second:
        assert [runner.wait(timeout=120) for runner in second.runners] == [0, 0]
        for node in range(2):
            assert second.wait_event(node, "rank_exited")["exit_code"] == 0
            assert second.wait_event(node, "runner_ended")["reason"] == ""
        resumed = [next(line for line in second.log(rank) if line["kind"] == "resumed") for rank in range(2)]
        replayed = [steps_of(second.log(rank)) for rank in range(2)]
        assert [line["step"] for line in second.log(0) if line["kind"] == "finished"] == [STEPS]

    undisturbed = [steps_of(log) for log in run_undisturbed(tmp_path / "undisturbed")]
    for rank in range(2):
        assert resumed[rank]["step"] == SAVE_EVERY
        assert resumed[rank]["live_digest"] == resumed[rank]["saved_digest"]
        assert len(resumed[rank]["saved_digest"]) == 5
        assert sorted(replayed[rank]) == list(range(SAVE_EVERY + 1, STEPS + 1))
        assert all(undisturbed[rank][step] == numbers for step, numbers in lost[rank].items())
        assert all(undisturbed[rank][step] == numbers for step, numbers in replayed[rank].items())
    assert resumed[0]["saved_digest"]["model"] == resumed[1]["saved_digest"]["model"]
    assert resumed[0]["saved_digest"]["rng"] != resumed[1]["saved_digest"]["rng"]
    names = [str(manifest.name) for manifest in complete_checkpoints(tmp_path / "checkpoints")]
    assert names == ["1:0", "1:20", "2:40", "2:52"]
