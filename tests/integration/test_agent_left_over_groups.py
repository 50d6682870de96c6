"""Control groups of agents that were killed and never started again, on the kernel's own file system."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agents.supervisor.cgroups import ControlGroup, NodeGroups
from tests.fakes.agent_process import AgentProcess
from tests.fakes.agent_server import FakeAgentServer

HELD = """\
import pathlib, sys, time
from agents.supervisor.cgroups import NodeGroups
groups = NodeGroups(pathlib.Path(sys.argv[1]))
groups.hold()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A group with nothing in it, in which agents' groups lie here as they do at the top."""
    groups = NodeGroups.find("probe", tmp_path)
    if groups is None:
        pytest.skip("cgroup v2 is not writable here: agents make no groups then")
    place = groups.group("place", 1)
    place.create()
    yield place.path
    place.remove()
    groups.leave()


def names(place: Path) -> list[str]:
    return sorted(one.name[-1] for one in place.iterdir() if one.is_dir())


def test_only_what_no_agent_holds_and_no_process_is_in_is_removed(place: Path) -> None:
    mine = NodeGroups(place / "everstep-gpu-01-0000000a")
    mine.hold()
    owned = place / "everstep-gpu-02-0000000b"
    ControlGroup(place / "everstep-gpu-03-0000000c" / "job_a-1").create()
    full = ControlGroup(place / "everstep-gpu-04-0000000d" / "job_a-1")
    full.create()
    with (
        subprocess.Popen([sys.executable, "-c", HELD, str(owned)], stdout=subprocess.PIPE) as owner,
        subprocess.Popen(["/bin/sleep", "600"]) as sleeper,
    ):
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"held\n"
        (full.path / "cgroup.procs").write_text(str(sleeper.pid))
        later = time.time() + 7200
        assert mine.remove_left_over(now=time.time()) == 0, "all of them are young"
        assert (mine.remove_left_over(now=later), names(place)) == (1, ["a", "b", "d"])
        owner.kill()
        owner.wait()
        assert (mine.remove_left_over(now=later), names(place)) == (1, ["a", "d"])
        assert sleeper.poll() is None
        sleeper.kill()
        sleeper.wait()
    assert (mine.remove_left_over(now=later), names(place)) == (1, ["a"])


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[AgentProcess]:
    server = FakeAgentServer()
    await server.start()
    agent = AgentProcess(server, tmp_path)
    yield agent
    agent.clean_up()
    await server.stop()


def held(directory: Path) -> bool:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


async def test_agent_holds_its_groups_from_its_start_until_it_is_killed(agent: AgentProcess) -> None:
    groups = NodeGroups.find(agent.name, agent.state)
    if groups is None:
        pytest.skip("cgroup v2 is not writable here: agents make no groups then")
    directory = groups.group("job", 1).path.parent
    assert not held(directory)
    await agent.start()
    assert held(directory)
    await agent.kill()
    assert not held(directory)
    groups.leave()
    assert not directory.exists()
