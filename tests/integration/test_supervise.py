"""The supervisor with real processes: it restarts, stops in order, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.cli.supervise import Service, Supervisor, SupervisorError

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, said: list[str]) -> Iterator[Supervisor]:
    with Supervisor(logs=tmp_path / "logs", say=said.append) as supervisor:
        yield supervisor


def service(tmp_path: Path, code: str, *, name: str = "child", stage: int = 0, **more: object) -> Service:
    return Service(
        name=name,
        argv=[sys.executable, "-c", code],
        environment=dict(os.environ),
        working_directory=tmp_path,
        stage=stage,
        **more,  # type: ignore[arg-type]
    )


def pump_until(supervisor: Supervisor, done: Callable[[], bool], *, limit_s: float = 60.0) -> None:
    limit = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < limit, "waited in vain"
        supervisor.pump(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_starts_again_what_was_killed(supervisor: Supervisor, tmp_path: Path, said: list[str]) -> None:
    supervisor.start(service(tmp_path, SLEEP))
    first = supervisor.pid("child")
    os.kill(first, signal.SIGKILL)
    pump_until(supervisor, lambda: supervisor.pid("child") != first)
    assert is_alive(supervisor.pid("child"))
    assert "child ended (SIGKILL) and starts again in 0.25 s" in said[0]


def test_waits_longer_before_each_further_start(supervisor: Supervisor, tmp_path: Path, said: list[str]) -> None:
    supervisor.start(service(tmp_path, "raise SystemExit(3)"))
    pump_until(supervisor, lambda: len(said) >= 3)
    assert ["0.25 s" in said[0], "0.5 s" in said[1], "1 s" in said[2]] == [True, True, True]


def test_kills_what_a_dead_leader_left_in_its_group(supervisor: Supervisor, tmp_path: Path) -> None:
    code = f"""
import subprocess, sys
grandchild = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])
open('pid', 'w').write(str(grandchild.pid))
grandchild.wait()
"""
    supervisor.start(service(tmp_path, code))
    pump_until(supervisor, lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
    grandchild, leader = int((tmp_path / "pid").read_text()), supervisor.pid("child")
    os.kill(leader, signal.SIGKILL)
    pump_until(supervisor, lambda: not is_alive(grandchild))


def test_stops_the_highest_stage_first(tmp_path: Path) -> None:
    code = """
import signal, sys, time
def leave(*_):
    open('order', 'a').write(sys.argv[1] + ' ')
    raise SystemExit
signal.signal(signal.SIGTERM, leave)
open('ready-' + sys.argv[1], 'w')
time.sleep(60)
"""
    with Supervisor(logs=tmp_path / "logs", say=print) as supervisor:
        for stage, name in ((0, "broker"), (2, "agent"), (1, "web")):
            plain = service(tmp_path, code, name=name, stage=stage)
            ready = tmp_path / f"ready-{name}"
            supervisor.start(
                Service(
                    name=name,
                    argv=[*plain.argv, name],
                    environment=plain.environment,
                    working_directory=tmp_path,
                    stage=stage,
                    check=lambda path=ready: "" if path.exists() else "no file",  # type: ignore[misc]
                )
            )
    assert (tmp_path / "order").read_text().split() == ["agent", "web", "broker"]


def test_kills_what_does_not_stop_in_time(tmp_path: Path, said: list[str]) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('up', 'w'); time.sleep(60)"
    with Supervisor(logs=tmp_path / "logs", say=said.append) as supervisor:
        check = lambda: "" if (tmp_path / "up").exists() else "no file"  # noqa: E731
        supervisor.start(service(tmp_path, code, check=check, stop_limit_s=0.3))
        pid = supervisor.pid("child")
    assert not is_alive(pid)
    assert "child did not stop in 0 s and is killed." in said


def test_says_why_a_service_never_became_ready(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(SupervisorError, match=r"(?s)child ended \(code 7\) before it was ready.*no such table"):
        supervisor.start(
            service(tmp_path, "import sys; print('no such table'); sys.exit(7)", check=lambda: "no answer")
        )


def test_gives_up_on_a_service_that_stays_unready(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(SupervisorError, match=r"child was not ready within 0 s \(no answer\)"):
        supervisor.start(service(tmp_path, SLEEP, check=lambda: "no answer", ready_limit_s=0.2))


def test_returns_what_a_command_printed_or_raises_its_last_lines(supervisor: Supervisor, tmp_path: Path) -> None:
    assert supervisor.run_once(service(tmp_path, "print('done')")) == "done\n"
    with pytest.raises(SupervisorError, match=r"(?s)child ended with code 2.*broken"):
        supervisor.run_once(service(tmp_path, "print('broken'); raise SystemExit(2)"))


def test_raises_on_a_stop_signal(tmp_path: Path) -> None:
    """In a process of its own: a signal to a process goes to any thread that does not block it, and tests have many."""
    code = """
from pathlib import Path
from everstep.cli.supervise import StopWanted, Supervisor
with Supervisor(logs=Path('logs'), say=print) as supervisor:
    Path('ready').touch()
    try:
        supervisor.pump(60)
    except StopWanted:
        print('stop wanted')
"""
    asked = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    limit = time.monotonic() + 10
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    asked.terminate()
    assert asked.communicate(timeout=10)[0].strip() == "stop wanted"


def test_says_which_program_is_missing(supervisor: Supervisor, tmp_path: Path) -> None:
    missing = Service(name="broker", argv=["/nowhere/valkey"], environment={}, working_directory=tmp_path)
    with pytest.raises(SupervisorError, match="Could not start broker"):
        supervisor.start(missing)


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from everstep.cli.supervise import Service, Supervisor
with Supervisor(logs=Path('logs'), say=print) as supervisor:
    supervisor.start(Service(name='child', argv=[sys.executable, '-c', {SLEEP!r}], environment=dict(os.environ),
                             working_directory=Path('.')))
    Path('pid').write_text(str(supervisor.pid('child')))
    supervisor.pump(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    limit = time.monotonic() + 10
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < limit
        time.sleep(0.05)
    child = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    while is_alive(child):
        assert time.monotonic() < limit, "the child outlived its supervisor"
        time.sleep(0.05)
