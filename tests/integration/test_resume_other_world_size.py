"""A job shrinks from three ranks to two and to one: the same samples in the same order, the same state, to the end."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from launches import Generation, wait_until

from everstep.checkpoint.manifest import complete_checkpoints
from tests.integration.forked_generation import ForkedGeneration, warm_up

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_gpt.py"
BATCH, STEPS, SAVE_EVERY = 12, 14, 4
COMMAND = [sys.executable, str(EXAMPLE), "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--device", "cpu"]


def steps_of(generation: Generation, rank: int) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in generation.log(rank) if line["kind"] == "step"}


def reaches(generation: Generation, step: int) -> None:
    """Training is beyond the step, and the checkpoint of it counts."""
    wait_until(lambda: max(steps_of(generation, 0), default=0) > step, limit_s=120)
    wait_until(lambda: step in [line["step"] for line in generation.log(0) if line["kind"] == "saved"], limit_s=60)


def resumed(generation: Generation, rank: int) -> dict[str, Any]:
    return next(line for line in generation.log(rank) if line["kind"] == "resumed")


def test_job_goes_on_with_fewer_ranks_in_the_same_order_of_samples(tmp_path: Path) -> None:
    warm_up()
    command = [*COMMAND, "--batch", str(BATCH), "--step-time", "0.1"]
    steps: list[list[dict[int, dict[str, Any]]]] = []
    digests: list[list[dict[str, Any]]] = []
    parents = [None, (1, SAVE_EVERY), (2, 2 * SAVE_EVERY)]
    for number, (world_size, parent) in enumerate(zip((3, 2, 1), parents, strict=True), start=1):
        with ForkedGeneration(
            tmp_path, command, number=number, nodes=1, ranks_per_node=world_size, parent=parent
        ) as generation:
            if world_size == 1:
                assert generation.runners[0].wait(timeout=60) == 0, generation.output(0)
                assert [line["step"] for line in generation.log(0) if line["kind"] == "finished"] == [STEPS]
            else:
                reaches(generation, number * SAVE_EVERY)
                generation.runners[0].send_signal(signal.SIGKILL)
                generation.runners[0].wait()
            steps.append([steps_of(generation, rank) for rank in range(world_size)])
            digests.append([resumed(generation, rank) for rank in range(world_size)])

    for number, records in enumerate(digests[1:], start=1):
        for record in records:
            assert record["step"] == number * SAVE_EVERY
            assert record["saved_digest"] == record["live_digest"]
            assert set(record["saved_digest"]) == {"model", "optimizer", "scheduler", "sampler"}, "and no generators"
    seen: dict[int, tuple[Any, ...]] = {}
    for ranks in steps:
        for rank in ranks:
            for step, line in rank.items():
                place = (line["epoch"], line["span_start"], line["span_stop"], line["learning_rate"])
                assert seen.setdefault(step, place) == place, "replayed on other samples, or at another rate"
    assert [seen[step][1:3] for step in range(1, STEPS + 1)] == [
        (first, first + BATCH) for first in range(0, STEPS * BATCH, BATCH)
    ]
    assert min(steps[1][0]) == SAVE_EVERY + 1 and min(steps[2][0]) == 2 * SAVE_EVERY + 1
    losses = [steps[2][0][step]["loss"] for step in (2 * SAVE_EVERY + 1, STEPS)]
    assert losses[1] < losses[0] < steps[0][0][1]["loss"], "it goes on learning from where it was"
    found = {str(manifest.name): manifest.world_size for manifest in complete_checkpoints(tmp_path / "checkpoints")}
    assert found == {"1:0": 3, "1:4": 3, "2:8": 2, "3:12": 1, "3:14": 1}


def test_batch_that_fewer_ranks_cannot_share_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import everstep\neverstep.ReplayableSampler(100, global_batch_size=9)\n")
    command = [sys.executable, str(tmp_path / "script.py")]
    with Generation(tmp_path, command, nodes=1, ranks_per_node=2) as generation:
        assert generation.runners[0].wait(timeout=60) == 1
        detail = generation.wait_event(0, "rank_exited")["detail"]
    assert "A global batch of 9 cannot be split evenly over 2 ranks: choose a multiple of the world size" in detail
