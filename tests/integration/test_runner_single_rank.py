"""The runner with a rank that needs no torch: environment, exits, signals, and who dies with whom."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launches import Generation, has_ended, wait_until

TELL_AND_SLEEP = """
import json, os, signal, sys, time
blocked = [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
print(json.dumps({"environment": dict(os.environ), "blocked": blocked, "argv": sys.argv[1:], "cwd": os.getcwd(),
                  "ignored": [int(s) for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN],
                  "open": sorted(os.listdir("/proc/self/fd"))}), flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(120)
"""


def script(tmp_path: Path, code: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(code)
    return [sys.executable, str(path), "${local_rank}", "two words"]


def told(generation: Generation) -> dict[str, Any]:
    wait_until(lambda: generation.events(0, "rank_started"))
    text: str = wait_until(lambda: generation.output(0) if "\n" in generation.output(0) else "")
    return dict(json.loads(text.splitlines()[0]))


def test_rank_gets_the_jobs_environment_and_dies_with_a_killed_runner(tmp_path: Path) -> None:
    with Generation(
        tmp_path, script(tmp_path, TELL_AND_SLEEP), nodes=1, parent=(3, 60), number=4, environment={"MINE": "1"}
    ) as generation:
        rank = generation.wait_event(0, "rank_started")
        seen = told(generation)
        environment = seen["environment"]
        expected = {
            "MINE": "1",
            "EVERSTEP_JOB": "job-1",
            "EVERSTEP_GENERATION": "4",
            "EVERSTEP_PLAN": "plan-4",
            "EVERSTEP_RESUME": "3:60",
            "EVERSTEP_MARK": generation.mark,
            "EVERSTEP_RUNNER_PID": str(generation.runners[0].pid),
            "EVERSTEP_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
            "EVERSTEP_LOG_DIR": str(generation.directories[0] / "logs"),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "1",
        }
        assert {name: environment.get(name) for name in expected} == expected
        assert "AGENT_SECRET" not in environment, "what the agent's environment holds is none of the job's business"
        assert (seen["argv"], seen["cwd"]) == (["${local_rank}", "two words"], str(tmp_path))
        assert seen["blocked"] == [] and signal.SIGTERM not in seen["ignored"]
        assert len(seen["open"]) <= 4, "standard streams and the listing itself"
        assert generation.wait_event(0, "runner_started")["protocol"] == 2
        assert {"kind": "poke", "job": "job-1", "generation": 4}.items() <= generation.datagrams()[0].items()
        generation.runners[0].kill()
        assert has_ended(rank["pid"], limit_s=2.0)


def test_term_kills_ranks_that_ignore_it_and_ends_the_runner(tmp_path: Path) -> None:
    with Generation(tmp_path, script(tmp_path, TELL_AND_SLEEP), nodes=1) as generation:
        told(generation)
        started = time.monotonic()
        generation.runners[0].send_signal(signal.SIGTERM)
        generation.runners[0].wait(timeout=10)
        assert time.monotonic() - started < 3.0
        assert [e["signal"] for e in generation.events(0, "rank_exited")] == [signal.SIGKILL]
        assert [e["reason"] for e in generation.events(0, "runner_ended")] == ["error"]


def test_failed_rank_is_reported_with_its_error(tmp_path: Path) -> None:
    code = "import sys\nprint('hello')\nsys.exit('ValueError: the data is gone')"
    with Generation(tmp_path, script(tmp_path, code), nodes=1) as generation:
        assert generation.runners[0].wait(timeout=60) == 1
        event = generation.events(0, "rank_exited")[0]
        assert (event["exit_code"], event["signal"], event["detail"]) == (1, None, "ValueError: the data is gone")
        assert generation.events(0, "runner_ended")[0]["reason"] == "rank_failed"


def test_interpreter_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with Generation(tmp_path, ["/no/such/python", "x.py"], nodes=1) as generation:
        assert generation.runners[0].wait(timeout=60) == 1
        event = generation.events(0, "rank_exited")[0]
        assert event["exit_code"] == 127 and "/no/such/python" in event["detail"]


def test_port_in_use_is_a_reason_of_its_own(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with Generation(tmp_path, ["true"], nodes=1, port=taken.getsockname()[1]) as generation:
            assert generation.runners[0].wait(timeout=60) == 1
            ended = generation.events(0, "runner_ended")[0]
    assert ended["reason"] == "port_busy"
    assert generation.events(0, "rank_started") == []


def test_waiting_for_the_other_node_ends_at_once_when_told(tmp_path: Path) -> None:
    """Node 1 of 2 alone: torch would wait for minutes, in native code."""
    with Generation(tmp_path, ["true"], nodes=1, node_rank=1, node_count=2, first_rank=1, world_size=2) as generation:
        wait_until(lambda: "libtorch" in Path(f"/proc/{generation.runners[0].pid}/maps").read_text())
        time.sleep(1.5)
        generation.runners[0].terminate()
        generation.runners[0].wait(timeout=10)
        assert generation.events(0, "runner_ended")[0]["reason"] == "error"


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/sys/fs/cgroup").is_dir(), reason="needs a cgroup that this account may make"
)
def test_runner_that_cannot_enter_its_cgroup_starts_nothing(tmp_path: Path) -> None:
    with Generation(tmp_path, ["true"], nodes=1, cgroup=str(tmp_path / "no-such-cgroup")) as generation:
        assert generation.runners[0].wait(timeout=30) == 2
        assert generation.events(0, "rank_started") == []


def test_launch_of_another_protocol_is_refused(tmp_path: Path) -> None:
    generation = Generation(tmp_path, ["true"], nodes=1, protocol=3)
    done = subprocess.run(
        [sys.executable, "-m", "everstep.elastic.runner", "--directory", str(generation.directories[0])],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2 and "protocol 3" in done.stderr
