"""Services held down for a drill, with real processes and the real supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.cli.hold import HOLD_FILE, MARKER_FILE
from everstep.cli.supervise import Service, Supervisor
from everstep.cli.up import _marked_as_supervised

CODE = """
import os, subprocess, sys, time
if sys.argv[1] == "worker":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "pool process"])
open(sys.argv[1] + ".starts", "a").write(f"{os.getpid()}\\n")
time.sleep(60)
"""
ROLES = ("web", "worker", "beat")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, said: list[str]) -> Iterator[Supervisor]:
    with Supervisor(logs=tmp_path / "logs", say=said.append, hold_file=tmp_path / HOLD_FILE) as supervisor:
        supervisor.start(*(service(tmp_path, name) for name in (*ROLES, "broker")))
        pump_until(supervisor, lambda: all((tmp_path / f"{name}.starts").exists() for name in (*ROLES, "broker")))
        yield supervisor


def service(tmp_path: Path, name: str) -> Service:
    return Service(
        name=name,
        argv=[sys.executable, "-c", CODE, name],
        environment=dict(os.environ),
        working_directory=tmp_path,
        check=lambda: "" if (tmp_path / f"{name}.starts").exists() else "no file",
    )


def ask(tmp_path: Path, *, seconds: float, roles: tuple[str, ...] = ROLES) -> None:
    aside = tmp_path / "hold.new"
    aside.write_text(json.dumps({"drill": "drl-1", "roles": roles, "until": time.time() + seconds, "by": "ann"}))
    aside.replace(tmp_path / HOLD_FILE)


def group_of(leader: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(words[2]) == leader and words[0] != "Z":
                found.append(int(entry.name))
    return found


def pump_until(supervisor: Supervisor, done: Callable[[], bool], *, limit_s: float = 60.0) -> None:
    limit = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < limit, "waited in vain"
        supervisor.pump(0.05)


def pump_for(supervisor: Supervisor, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        supervisor.pump(0.05)


def test_holds_whole_groups_down_until_the_time_and_starts_them_again(
    supervisor: Supervisor, tmp_path: Path, said: list[str]
) -> None:
    before = {name: supervisor.pid(name) for name in (*ROLES, "broker")}
    ask(tmp_path, seconds=4.0)
    began = time.monotonic()
    pump_until(supervisor, lambda: not any(group_of(before[name]) for name in ROLES))
    assert time.monotonic() - began < 1.0
    pump_for(supervisor, 1.0)
    assert all(supervisor.pid(name) == before[name] for name in ROLES), "none is back yet"
    pump_until(supervisor, lambda: all(supervisor.pid(name) != before[name] for name in ROLES))
    assert 3.9 < time.monotonic() - began < 5.0
    assert not (tmp_path / HOLD_FILE).exists()
    assert supervisor.pid("broker") == before["broker"]
    assert group_of(before["broker"])
    assert said[0] == "Drill drl-1 holds web, worker, beat down for 4 s."
    assert not any("ended (SIGKILL)" in line for line in said)


def test_holds_only_what_it_was_asked_to(supervisor: Supervisor, tmp_path: Path) -> None:
    before = {name: supervisor.pid(name) for name in ROLES}
    ask(tmp_path, seconds=0.5, roles=("web",))
    pump_until(supervisor, lambda: supervisor.pid("web") != before["web"])
    assert (supervisor.pid("worker"), supervisor.pid("beat")) == (before["worker"], before["beat"])


def test_a_service_that_was_down_anyway_stays_down_and_comes_back(supervisor: Supervisor, tmp_path: Path) -> None:
    first = supervisor.pid("web")
    os.kill(first, signal.SIGKILL)
    ask(tmp_path, seconds=1.5)
    pump_for(supervisor, 1.0)
    assert supervisor.pid("web") == first
    pump_until(supervisor, lambda: supervisor.pid("web") != first)


def test_is_over_as_soon_as_the_file_is_gone(supervisor: Supervisor, tmp_path: Path) -> None:
    first = supervisor.pid("web")
    ask(tmp_path, seconds=60.0)
    pump_until(supervisor, lambda: not group_of(first))
    (tmp_path / HOLD_FILE).unlink()
    pump_until(supervisor, lambda: supervisor.pid("web") != first, limit_s=2.0)


def test_a_long_wait_does_not_delay_it(supervisor: Supervisor, tmp_path: Path) -> None:
    first = supervisor.pid("web")
    ask(tmp_path, seconds=60.0)
    began = time.monotonic()
    supervisor.pump(5.0)
    supervisor.pump(5.0)
    assert time.monotonic() - began < 1.0
    assert not group_of(first)


def test_a_supervisor_that_starts_anew_ends_the_hold(tmp_path: Path, said: list[str]) -> None:
    ask(tmp_path, seconds=60.0)
    with Supervisor(logs=tmp_path / "logs", say=said.append, hold_file=tmp_path / HOLD_FILE) as supervisor:
        supervisor.start(service(tmp_path, "web"))
        pump_for(supervisor, 0.5)
        assert group_of(supervisor.pid("web"))
    assert not (tmp_path / HOLD_FILE).exists()
    assert said == ["A drill of an earlier start held services down: that is over."]


def test_without_a_place_for_it_no_file_is_looked_for(tmp_path: Path, said: list[str]) -> None:
    ask(tmp_path, seconds=60.0)
    with Supervisor(logs=tmp_path / "logs", say=said.append) as supervisor:
        supervisor.start(service(tmp_path, "web"))
        pump_for(supervisor, 0.5)
        assert group_of(supervisor.pid("web"))


def test_a_marker_says_that_somebody_supervises_as_long_as_that_is_so(tmp_path: Path) -> None:
    with _marked_as_supervised(tmp_path):
        assert (tmp_path / MARKER_FILE).read_text() == f"{os.getpid()}\n"
    assert not (tmp_path / MARKER_FILE).exists()


def test_killed_again_and_again_a_service_is_back_within_its_own_limit(tmp_path: Path, said: list[str]) -> None:
    plain = service(tmp_path, "gpu-01")
    agent = Service(
        name=plain.name,
        argv=plain.argv,
        environment=plain.environment,
        working_directory=tmp_path,
        longest_back_off_s=0.5,
    )
    with Supervisor(logs=tmp_path / "logs", say=said.append) as supervisor:
        supervisor.start(agent)
        for _ in range(4):
            pid = supervisor.pid("gpu-01")
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            pump_until(supervisor, lambda pid=pid: supervisor.pid("gpu-01") != pid)  # type: ignore[misc]
            assert time.monotonic() - killed < 0.9


def test_everything_held_down_dies_with_the_supervisor_too(tmp_path: Path) -> None:
    """A supervisor that is killed in the middle of a hold leaves nothing running and nothing that never ends."""
    code = f"""
import os, sys
from pathlib import Path
sys.path[:0] = {[str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]!r}
from test_supervise_hold import ask, service
from everstep.cli.supervise import Supervisor
home = Path({str(tmp_path)!r})
with Supervisor(logs=home / 'logs', say=print, hold_file=home / 'hold.json') as supervisor:
    supervisor.start(service(home, 'web'), service(home, 'broker'))
    ask(home, seconds=60)
    for _ in range(20):
        supervisor.pump(0.05)
    (home / 'held').write_text(str(supervisor.pid('broker')))
    supervisor.pump(60)
    while True:
        supervisor.pump(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    limit = time.monotonic() + 15
    while not (tmp_path / "held").exists() or not (tmp_path / "held").read_text():
        assert time.monotonic() < limit
        time.sleep(0.05)
    broker = int((tmp_path / "held").read_text())
    parent.kill()
    parent.wait()
    while group_of(broker):
        assert time.monotonic() < limit, "the broker outlived its supervisor"
        time.sleep(0.05)
    with Supervisor(logs=tmp_path / "logs", say=lambda text: None, hold_file=tmp_path / HOLD_FILE) as supervisor:
        supervisor.start(service(tmp_path, "web"))
        pump_for(supervisor, 0.5)
        assert group_of(supervisor.pid("web"))
