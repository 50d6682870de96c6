"""Two real ranks are asked to save: by a number that reaches one of them only, and by SIGTERM to one of them only."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import free_port, lines_of, wait_until

from everstep.checkpoint.manifest import complete_checkpoints
from tests.integration.forked_generation import fork_script, warm_up

SCRIPT = """
import time, torch, torch.distributed as dist, everstep
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run = everstep.Run(total_steps=5000, save_every={save_every!r}, seed=1)
run.track(model=model, optimizer=optimizer, scheduler=None, sampler=None)
run.resume()
for step in run.steps():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    run.report(loss=loss)
    time.sleep(0.02)
"""


class Pair:
    """Two ranks, each on a node of its own as far as the files of its agent go."""

    def __init__(
        self, root: Path, *, save_every: int | str = 100_000, stale_request: int = 0, **environment: str
    ) -> None:
        """stale_request: what rank 1 finds at its start, asked of a generation before it."""
        (root / "train.py").write_text(SCRIPT.format(save_every=save_every))
        self.root = root
        self.run_directories = [root / f"node-{rank}" for rank in range(2)]
        port = str(free_port())
        warm_up()
        self.processes = []
        for rank, directory in enumerate(self.run_directories):
            directory.mkdir()
            if rank == 1 and stale_request:
                self.ask(1, stale_request)
            given = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": "2",
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "OMP_NUM_THREADS": "1",
                "EVERSTEP_RUN_DIR": str(directory),
                "EVERSTEP_LOG_DIR": str(directory),
                "EVERSTEP_CHECKPOINT_DIR": str(root / "checkpoints"),
                **environment,
            }
            self.processes.append(fork_script([sys.executable, "train.py"], given, directory=root))

    def ask(self, rank: int, number: int) -> None:
        """As its agent does: a whole file, put in place."""
        aside = self.run_directories[rank] / ".save-request.aside"
        aside.write_text(f"{number}\n")
        aside.rename(self.run_directories[rank] / "save-request")

    def log(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [line for line in lines_of(self.run_directories[rank] / f"rank-{rank}.jsonl") if line["kind"] == kind]

    def saved(self) -> list[int]:
        """Steps of the checkpoints that count; rank 0 is told."""
        return [line["step"] for line in self.log(0, "saved")]

    def saves_begun(self, rank: int) -> int:
        return len([line for line in self.log(rank, "phase") if line["phase"] == "save"])

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, stale_request=7)
    try:
        wait_until(lambda: len(made.log(0, "step")) > 5)
        yield made
    finally:
        made.kill()


def test_a_request_that_reaches_one_rank_gives_one_save_of_both_at_the_same_step(pair: Pair) -> None:
    wait_until(lambda: len(pair.log(0, "step")) > 100)
    assert pair.saved() == [0]  # what was asked before they began is not asked of them
    pair.ask(1, 8)
    asked_at = time.monotonic()
    wait_until(lambda: len(pair.saved()) == 2)
    assert time.monotonic() - asked_at < 5.0
    pair.ask(0, 8)  # the other node's agent is late with the same wish
    seen = len(pair.log(0, "step"))
    wait_until(lambda: len(pair.log(0, "step")) > seen + 100)
    assert [pair.saves_begun(rank) for rank in range(2)] == [2, 2]
    assert len(pair.saved()) == 2
    pair.ask(0, 9)
    wait_until(lambda: len(pair.saved()) == 3)
    assert [pair.saves_begun(rank) for rank in range(2)] == [3, 3]


def test_sigterm_to_one_rank_saves_once_and_ends_both(pair: Pair) -> None:
    pair.processes[1].send_signal(signal.SIGTERM)
    assert [process.wait(timeout=20) for process in pair.processes] == [143, 143]
    last = max(line["step"] for line in pair.log(0, "step"))
    assert [manifest.name.step for manifest in complete_checkpoints(pair.root / "checkpoints")] == [0, last]
    assert pair.log(0, "finished") == []


def test_auto_finds_one_interval_for_both_ranks_and_the_server_s_word_overrides_it(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "told").mkdir()
    alone = Pair(tmp_path / "alone", save_every="auto")
    try:
        wait_until(lambda: len(alone.log(0, "step")) > 110 and len(alone.saved()) > 1)
        assert alone.saves_begun(0) == alone.saves_begun(1)
        assert alone.saved()[:2] == [0, 100]
    finally:
        alone.kill()
    told = Pair(tmp_path / "told", save_every="auto", EVERSTEP_SAVE_EVERY="7")
    try:
        wait_until(lambda: len(told.saved()) > 3)  # told some steps after it was begun
        assert told.saved()[:4] == [0, 7, 14, 21]
    finally:
        told.kill()


STUCK = """
import ctypes
from everstep.ranks import Team
from everstep.save_requests import SaveRequests
requests = SaveRequests(None, term_limit_s=0.5)
requests.begin(Team(), step=0)
print("up", flush=True)
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
lock(mutex)
lock(mutex)
"""


def test_sigterm_ends_a_rank_that_is_stuck_below_python_at_the_limit() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        assert process.wait(timeout=20) == 143
        assert 0.3 < time.monotonic() - begun < 5.0
    finally:
        process.kill()
