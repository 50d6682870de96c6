"""One generation while it trains, as a fault sees it: how far it is, who its processes are, and how to kill them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from everstep.checkpoint.manifest import ASIDE, MANIFEST, CheckpointName
from exactness.moments import writers_of
from tests.integration.launches import Generation, has_ended

_LIMIT_S = 600.0
"""Of a generation, on a machine that is busy with other work."""
_GONE_WITHIN_S = 20.0
_TAIL_BYTES = 16384


class DidNotHappen(Exception):
    """A fault that did not fire as it should, or a generation that did not go as it should: nothing is proven."""


class Live:
    """A generation that was started. `step_time_s`: what a step takes at least. `memory`: where each node keeps its
    snapshots, if it does. `memory_dies`: it is lost with the node's runner, as if the node were."""

    def __init__(
        self,
        generation: Generation,
        root: Path,
        *,
        number: int,
        step_time_s: float,
        memory: Sequence[Path] = (),
        memory_dies: bool = False,
    ) -> None:
        self._generation = generation
        self._checkpoints = root / "checkpoints"
        self.number = number
        self.memory = memory
        self._memory_dies = memory_dies
        self._pids: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self.step_time_s = step_time_s
        self.world_size = generation.ranks_per_node * len(generation.directories)

    # --- How far it is --------------------------------------------------------------------------------------------

    def last_step(self) -> int:
        """The last step that any rank has reported."""
        return max(_last_step(self._log(rank)) for rank in range(self.world_size))

    def _log(self, rank: int) -> Path:
        return self._generation.directories[self._node(rank)] / "logs" / f"rank-{rank}.jsonl"

    def _node(self, rank: int) -> int:
        return rank // self._generation.ranks_per_node

    def ended(self) -> bool:
        """Whether a runner has ended."""
        return any(runner.poll() is not None for runner in self._generation.runners)

    def wait_for_step(self, step: int) -> None:
        """Until rank 0 has reported a step of that number or a later one."""
        self._wait(lambda: _last_step(self._log(0)) >= step, f"it came to step {step}", limit_s=_LIMIT_S)

    def save_directory(self) -> Path:
        return self._name(0).directory(self._checkpoints).parent

    def is_complete(self, step: int) -> bool:
        """Whether this generation has saved the step."""
        return (self._name(step).directory(self._checkpoints) / MANIFEST).exists()

    def _name(self, step: int) -> CheckpointName:
        return CheckpointName(generation=self.number, step=step)

    # --- Processes ------------------------------------------------------------------------------------------------

    def ranks(self) -> dict[int, int]:
        """Process id of each rank."""
        if len(self._pids) < self.world_size:
            for node in range(len(self._generation.directories)):
                self._pids |= {event["rank"]: event["pid"] for event in self._generation.events(node, "rank_started")}
        return self._pids

    def counts(self, path: Path) -> bool:
        """Whether what was caught unfinished at `path` is a checkpoint, or a part of a snapshot, by now."""
        final = path.with_name("-".join(path.name.removeprefix(ASIDE).split("-")[:2]))
        return (final / MANIFEST).exists()

    def has_lost_writer_of(self, path: Path) -> bool:
        """Whether the writer is dead that would have let it count: a node's own, or on disk that of rank 0."""
        node = next((node for node, root in enumerate(self.memory) if path.is_relative_to(root)), 0)
        writer = self._writer_of(node)
        return writer is not None and has_ended(writer, limit_s=0.0)

    def starts_writer(self, rank: int) -> bool:
        """The first rank of a node does, and its writer dies with it."""
        return rank % self._generation.ranks_per_node == 0

    def writers(self) -> list[int]:
        """The writers that live; who they are is remembered."""
        found = writers_of(list(self.ranks().values()))
        self._writers |= found
        return list(found.values())

    def _writer_of(self, node: int) -> int | None:
        return self._writers.get(self.ranks()[node * self._generation.ranks_per_node])

    def kill_rank(self, rank: int) -> str:
        """SIGKILL to one rank; the runner reports it, and the others cannot go on."""
        node = self._node(rank)
        os.kill(self.ranks()[rank], signal.SIGKILL)
        event = self._wait(
            lambda: self._exit_of(rank), f"the death of rank {rank} was reported", limit_s=_GONE_WITHIN_S
        )
        if event["signal"] != signal.SIGKILL:
            raise DidNotHappen(f"rank {rank} was killed and is said to have ended otherwise: {event}")
        if self.starts_writer(rank) and (writer := self._writer_of(node)) is not None:
            self._see_gone([writer], f"the writer of rank {rank}")
        return f"rank {rank}"

    def kill_runner_of(self, rank: int) -> str:
        """SIGKILL to a rank's runner; the kernel takes its ranks and their writer along."""
        node = self._node(rank)
        runner = self._generation.runners[node]
        runner.send_signal(signal.SIGKILL)
        if (code := runner.wait(timeout=_GONE_WITHIN_S)) != -signal.SIGKILL:
            raise DidNotHappen(f"the runner of node {node} had ended with code {code} before it was killed")
        writer = self._writer_of(node)
        ranks = [pid for other, pid in self.ranks().items() if self._node(other) == node]
        self._see_gone([*ranks, *([writer] if writer else [])], f"ranks and writer of node {node}")
        if not self._memory_dies:
            return f"runner of node {node}"
        shutil.rmtree(self.memory[node])
        return f"runner of node {node}, whose memory is lost"

    def kill_writer_of(self, rank: int) -> str:
        """SIGKILL to the writer of a rank's node; training goes on with another one."""
        node = self._node(rank)
        writer = self._writer_of(node)
        if writer is None:
            raise DidNotHappen(f"node {node} has no writer to kill")
        os.kill(writer, signal.SIGKILL)
        self._see_gone([writer], f"the writer of node {node}")
        return f"writer of node {node}"

    def terminate(self, rank: int, *, limit_s: float) -> dict[int, int | None]:
        """SIGTERM to one rank; each rank's exit code once all have ended, None where it was killed."""
        os.kill(self.ranks()[rank], signal.SIGTERM)
        ranks = range(self.world_size)
        exits = self._wait(
            lambda: all(found := [self._exit_of(other) for other in ranks]) and found,
            f"all ranks ended after SIGTERM to rank {rank}",
            limit_s=limit_s,
            while_it_runs=False,
        )
        return {event["rank"]: event["exit_code"] for event in exits}

    def _exit_of(self, rank: int) -> Any:
        exits = self._generation.events(self._node(rank), "rank_exited")
        return next((event for event in exits if event["rank"] == rank), None)

    # --- The end --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until it has done all its steps. Raises `DidNotHappen` if it ends otherwise."""
        codes = [runner.wait(timeout=_LIMIT_S) for runner in self._generation.runners]
        if any(codes):
            raise DidNotHappen(f"its runners ended with {codes} by themselves. {self.last_words()}")

    def see_gone(self) -> None:
        """Wait until nothing of it lives that could write: the proof of stop, without which no other may begin."""
        self.writers()
        for runner in self._generation.runners:
            runner.wait(timeout=_LIMIT_S)
        self._see_gone([*self.ranks().values(), *self._writers.values()], "ranks and writers")

    def _see_gone(self, pids: list[int], who: str) -> None:
        if not all(has_ended(pid, limit_s=_GONE_WITHIN_S) for pid in pids):
            raise DidNotHappen(f"{who} are not all gone after {_GONE_WITHIN_S:.0f} s")

    def last_words(self) -> str:
        """The end of what its ranks have printed."""
        said = [f"rank {rank}: {self._generation.output(rank)[-1500:]}" for rank in range(self.world_size)]
        return "\n".join(said)

    def _wait(self, condition: Callable[[], Any], what: str, *, limit_s: float, while_it_runs: bool = True) -> Any:
        deadline = time.monotonic() + limit_s
        while not (found := condition()):
            ended = while_it_runs and self.ended()
            if (ended and not (found := condition())) or time.monotonic() > deadline:
                raise DidNotHappen(
                    f"the generation ended, or {limit_s:.0f} s passed, before {what}. {self.last_words()}"
                )
            if found:
                break
            time.sleep(0.001)
        return found


def _last_step(log: Path) -> int:
    """The last whole line that reports a step."""
    with contextlib.suppress(OSError):
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)[1:]
        for line in reversed(lines):
            if b'"step"' in line and line.endswith(b"\n") and (said := json.loads(line))["kind"] == "step":
                return int(said["step"])
    return 0
