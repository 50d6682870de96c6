"""A keeper with real processes: what it does, that it undoes it, and what the next one makes of a keeper's death."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.boot_clock import boottime_ns
from agents.faults import keeper
from agents.faults.kept_fault import KeptFile, KeptStep
from agents.faults.tombstone import read_tombstone, tombstone_path
from tests.fakes.drilled_node import DrilledNode, goes_on, state_of, wait_until

RANK = Path(__file__).resolve().parents[1] / "fakes" / "talking_rank.py"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DrilledNode]:
    node = DrilledNode(tmp_path)
    yield node
    node.clean_up()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[DrilledNode, DrilledNode]]:
    """Two nodes on one machine whose ranks talk to each other; the ranks stand in for their runners."""
    talk = tmp_path / "talk"
    talk.mkdir()
    nodes = [
        DrilledNode(tmp_path, name=name, runner=[sys.executable, str(RANK), role, str(talk), name])
        for name, role in (("node-a", "listen"), ("node-b", "connect"))
    ]
    wait_until(lambda: all(len(heard(tmp_path, node.name)) > 3 for node in nodes))
    yield nodes[0], nodes[1]
    for node in nodes:
        node.clean_up()


def heard(tmp_path: Path, name: str) -> list[int]:
    path = tmp_path / "talk" / f"{name}.heard"
    return [int(line.split()[1]) for line in path.read_text().splitlines() if " " in line] if path.exists() else []


def test_freezes_all_and_wakes_all(node: DrilledNode) -> None:
    frozen = [node.agent.pid, *(process.pid for process in node.generation())]
    keeping = node.keeper(node.fault("freeze-node", duration_s=4.0))
    wait_until(lambda: node.noted().step is KeptStep.APPLIED)
    began = time.monotonic()
    assert [state_of(pid) for pid in frozen] == ["T"] * 4
    wait_until(lambda: node.noted().step is KeptStep.UNDONE)
    assert 2.5 < time.monotonic() - began < 12.0
    wait_until(lambda: all(goes_on(pid) for pid in frozen))
    assert keeping.wait(5) == 0
    assert node.noted().detail == "SIGSTOP to 4 processes: the agent, the runner and all below it"


def test_kills_agent_and_generation_and_holds_the_next_agent_down(node: DrilledNode) -> None:
    keeping = node.keeper(node.fault("kill-agent", duration_s=2.0))
    wait_until(lambda: node.noted().step is KeptStep.APPLIED)
    node.agent.wait(1)
    assert node.generation() == []
    supervised = node.start_agent()
    time.sleep(1.0)
    assert len(node.starts()) == 1, "it must stay away"
    wait_until(lambda: len(node.starts()) == 2)
    applied_at = node.noted().applied_at
    assert applied_at is not None and time.time() - applied_at > 1.5
    assert node.starts()[1] == supervised.pid
    assert keeping.wait(5) == 0
    assert node.noted().undone_detail == f"The agent is back as process {supervised.pid}."
    assert not tombstone_path(node.state).exists()


@pytest.mark.parametrize("kind", ["kill-agent", "restart-agent"])
def test_starts_the_agent_itself_when_nobody_does(
    node: DrilledNode, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = node.keeper(node.fault(kind, duration_s=0.2 if kind == "kill-agent" else 0.0))
    node.agent.wait(10)
    killed = time.monotonic()
    wait_until(lambda: len(node.starts()) == 2)
    assert 4.0 < time.monotonic() - killed < 10.0
    assert keeping.wait(5) == 0
    pid = node.starts()[1]
    assert node.noted().undone_detail == f"Nobody else started the agent: the keeper did, as process {pid}."
    assert goes_on(pid)
    assert Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:-1] == [
        os.fsencode(word) for word in node.agent_argv[1:]
    ]
    assert len(node.generation()) == (0 if kind == "kill-agent" else 3)


def test_isolated_ranks_hear_nothing_of_each_other_and_go_on_afterwards(
    pair: tuple[DrilledNode, DrilledNode], tmp_path: Path
) -> None:
    node, other = pair
    keeping = node.keeper(node.fault("isolate-node", duration_s=3.0))
    wait_until(lambda: node.noted().step is KeptStep.APPLIED)
    deaf = len(heard(tmp_path, node.name))
    time.sleep(1.0)  # what the window still held arrives within moments
    silent = len(heard(tmp_path, other.name))
    time.sleep(1.0)
    assert len(heard(tmp_path, node.name)) <= deaf + 1, "the isolated rank hears nothing"
    assert len(heard(tmp_path, other.name)) == silent, "and its peer hears nothing of it"
    assert goes_on(node.runner.pid) and goes_on(other.runner.pid), "nobody had to be stopped for it"
    assert node.noted().step is KeptStep.APPLIED
    assert keeping.wait(10) == 0
    for name in (node.name, other.name):
        wait_until(lambda name=name: len(heard(tmp_path, name)) > 200)  # type: ignore[misc]
        numbers = heard(tmp_path, name)
        assert numbers == list(range(1, len(numbers) + 1)), "not a byte was lost"
    assert node.noted().detail == "1 TCP connections to ranks on other nodes made deaf"


def test_isolation_is_refused_where_there_is_nothing_to_cut(node: DrilledNode) -> None:
    assert node.keeper(node.fault("isolate-node", duration_s=2.0)).wait(10) == 0
    noted = node.noted()
    assert noted.step is KeptStep.REFUSED
    assert "no TCP connection to ranks on other nodes" in noted.detail


def test_comes_too_late_for_its_deadline(node: DrilledNode) -> None:
    assert node.keeper(node.fault("freeze-node", duration_s=2.0, not_after_s=-0.1)).wait(10) == 0
    assert node.noted().step is KeptStep.EXPIRED
    assert goes_on(node.agent.pid)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


@pytest.mark.parametrize("kind", sorted(keeper.KINDS))
def test_all_that_undoing_takes_is_on_disk_before_the_fault(
    pair: tuple[DrilledNode, DrilledNode], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, _ = pair
    file = node.fault(kind, duration_s=5.0)

    def die(*_: object) -> str:
        raise Killed

    monkeypatch.setattr(keeper.KINDS[kind], "begin", die)
    before = boottime_ns()
    with pytest.raises(Killed):
        keeper.keep(file)
    noted = node.noted()
    assert noted.step is KeptStep.DOING
    assert noted.undo_at_ns >= before + 5_000_000_000
    assert goes_on(node.agent.pid)


@pytest.mark.parametrize("signals_sent", [1, 2, 3])
def test_a_keeper_that_dies_while_it_freezes_leaves_nobody_frozen_for_the_next_one(
    node: DrilledNode, signals_sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    def dying_send(name: object, number: signal.Signals) -> bool:
        if len(sent) == signals_sent:
            raise Killed
        sent.append(name)
        return really_send(name, number)  # type: ignore[arg-type]

    really_send = keeper.send
    monkeypatch.setattr(keeper, "send", dying_send)
    file = node.fault("freeze-node", duration_s=0.5)
    with pytest.raises(Killed):
        keeper.keep(file)
    everyone = [node.agent.pid, *(process.pid for process in node.generation())]
    wait_until(lambda: [state_of(pid) for pid in everyone].count("T") == signals_sent)
    assert node.keeper(file).wait(10) == 0
    assert node.noted().step is KeptStep.UNDONE
    wait_until(lambda: all(goes_on(pid) for pid in everyone))


@pytest.mark.parametrize("kind", ["freeze-node", "isolate-node"])
def test_the_next_keeper_undoes_what_a_killed_one_did(
    pair: tuple[DrilledNode, DrilledNode], tmp_path: Path, kind: str
) -> None:
    node, _ = pair
    file = node.fault(kind, duration_s=2.0)
    first = node.keeper(file)
    wait_until(lambda: node.noted().step is KeptStep.APPLIED)
    begun = node.noted()
    first.kill()
    first.wait()
    time.sleep(2.2)
    silent = len(heard(tmp_path, node.name))
    assert node.keeper(file).wait(10) == 0
    noted = node.noted()
    assert noted.step is KeptStep.UNDONE
    assert (noted.applied_at, noted.undo_at_ns) == (begun.applied_at, begun.undo_at_ns), "it was not done again"
    assert goes_on(node.agent.pid)
    wait_until(lambda: len(heard(tmp_path, node.name)) > silent + 20)


def test_never_does_a_fault_twice(node: DrilledNode) -> None:
    file = node.fault("freeze-node", duration_s=0.5)
    assert node.keeper(file).wait(10) == 0
    noted = node.noted()
    assert node.keeper(file).wait(10) == 0
    assert node.noted() == noted


def test_of_two_keepers_one_goes_away(node: DrilledNode) -> None:
    file = node.fault("freeze-node", duration_s=4.0)
    first = node.keeper(file)
    wait_until(lambda: node.noted().step is KeptStep.APPLIED)
    assert node.keeper(file).wait(3.5) == 0
    assert node.noted().step is KeptStep.APPLIED
    assert first.wait(10) == 0


def test_undoes_at_once_when_asked_to_end(node: DrilledNode) -> None:
    keeping = node.keeper(node.fault("freeze-node", duration_s=60.0))
    wait_until(lambda: node.noted().step is KeptStep.APPLIED)
    keeping.terminate()
    assert keeping.wait(5) == 0
    assert node.noted().step is KeptStep.UNDONE
    wait_until(lambda: goes_on(node.agent.pid))


def test_of_an_earlier_boot_nothing_is_left_to_undo(node: DrilledNode) -> None:
    file = node.fault("kill-agent", duration_s=60.0)
    file.note(step=KeptStep.APPLIED, boot_id="another boot")
    assert node.keeper(file).wait(10) == 0
    assert node.noted().undone_detail == "The node has booted since."
    assert len(node.starts()) == 1


def test_the_tombstone_stands_before_the_agent_falls(node: DrilledNode, monkeypatch: pytest.MonkeyPatch) -> None:
    file = node.fault("kill-agent", duration_s=30.0)

    def die(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(keeper, "_kill_agent", die)
    with pytest.raises(Killed):
        keeper.keep(file)
    found = read_tombstone(node.state)
    assert found is not None
    assert found.until_boottime_ns == KeptFile.read(file.path).value.undo_at_ns  # type: ignore[union-attr]
