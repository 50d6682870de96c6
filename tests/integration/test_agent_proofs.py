"""Proofs of stop on real processes: stubborn, hidden, stopped, stuck; found by their agent or by its next life."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agents.protocol.messages import AssignmentPhase, ProofKind, RankExited, SeenPhase
from agents.supervisor.cgroups import NodeGroups
from tests.fakes.agent_process import AgentProcess
from tests.fakes.agent_server import FakeAgentServer
from tests.fakes.hung_files import hung_file
from tests.integration.agent_lives import reports, run_generation, state_of, steps

P = AssignmentPhase
S = SeenPhase
WAYS = [ProofKind.CGROUP_EMPTY, ProofKind.PROC_SCAN_EMPTY]


@pytest.fixture
async def server() -> AsyncIterator[FakeAgentServer]:
    server = FakeAgentServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def agent(server: FakeAgentServer, tmp_path: Path) -> AsyncIterator[AgentProcess]:
    agent = AgentProcess(server, tmp_path)
    yield agent
    agent.clean_up()


def choose(agent: AgentProcess, kind: ProofKind, tmp_path: Path) -> None:
    """Let the agent prove stops in one of its two ways."""
    if kind is ProofKind.PROC_SCAN_EMPTY:
        agent.more = ("--no-cgroup",)
        return
    groups = NodeGroups.find("probe", tmp_path)
    if groups is None:
        pytest.skip("cgroup v2 is not writable here; the other case is what happens then")
    groups.leave()


async def made_cold(agent: AgentProcess, *, cold: bool) -> None:
    """Let the processes be found by a next life of the agent, which is not their parent."""
    if cold:
        await agent.kill()
        await agent.start()


async def proof_of(server: FakeAgentServer, agent: AgentProcess) -> ProofKind:
    server.order([agent.assignment(P.STOP)])
    await server.until(lambda: reports(server, S.STOPPED))
    proof = reports(server, S.STOPPED)[0].proof
    assert proof is not None
    return proof.kind


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("kind", WAYS)
async def test_ends_what_ignores_and_hides(
    kind: ProofKind, cold: bool, server: FakeAgentServer, agent: AgentProcess, tmp_path: Path
) -> None:
    choose(agent, kind, tmp_path)
    note = tmp_path / "ghost"
    await agent.start()
    await run_generation(agent, STUB_STUBBORN="1", STUB_GHOST=str(note))
    await server.until(lambda: note.exists() and note.read_text() and steps(server))
    ghost = int(note.read_text())
    await made_cold(agent, cold=cold)
    assert await proof_of(server, agent) is kind
    assert not agent.marked()
    assert state_of(ghost) in ("", "Z")


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("kind", WAYS)
async def test_ends_what_was_stopped(
    kind: ProofKind, cold: bool, server: FakeAgentServer, agent: AgentProcess, tmp_path: Path
) -> None:
    choose(agent, kind, tmp_path)
    await agent.start()
    await run_generation(agent, STUB_STUBBORN="1")
    await server.until(lambda: steps(server))
    for pid in agent.marked():
        os.kill(pid, signal.SIGSTOP)
    await made_cold(agent, cold=cold)
    assert await proof_of(server, agent) is kind
    assert not agent.marked()


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("kind", WAYS)
async def test_finds_a_ghost_whose_runner_is_dead(
    kind: ProofKind, cold: bool, server: FakeAgentServer, agent: AgentProcess, tmp_path: Path
) -> None:
    """It has another environment, another session and no parent that would lead to it; cold, not even the agent's."""
    choose(agent, kind, tmp_path)
    note = tmp_path / "ghost"
    await agent.start()
    await run_generation(agent, STUB_GHOST=str(note))
    await server.until(lambda: note.exists() and note.read_text() and steps(server))
    ghost = int(note.read_text())
    runner = json.loads((agent.state / "runs/job-1/1.json").read_text())["pid"]
    if cold:
        await agent.kill()
    os.kill(runner, signal.SIGKILL)
    if cold:
        while [pid for pid in agent.marked() if state_of(pid) not in ("", "Z") and pid != ghost]:
            for pid in agent.marked():
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
        assert state_of(ghost) not in ("", "Z")
        await agent.start()
    await server.until(lambda: reports(server, S.STOPPED))
    proof = reports(server, S.STOPPED)[0].proof
    assert proof is not None
    assert proof.kind is kind
    assert state_of(ghost) in ("", "Z")


@pytest.mark.parametrize("kind", WAYS)
async def test_what_is_stuck_in_the_kernel_is_proof_for_other_nodes_only(
    kind: ProofKind, server: FakeAgentServer, agent: AgentProcess, tmp_path: Path
) -> None:
    choose(agent, kind, tmp_path)
    with hung_file(tmp_path / "hung") as path:
        await agent.start()
        await run_generation(agent, STUB_HANG=str(path))
        await server.until(lambda: 3 in steps(server))
        server.order([agent.assignment(P.STOP)])
        await asyncio.sleep(3.0)
        assert not reports(server, S.STOPPED), "it was not looked at for long enough"
        stuck = agent.marked()
        assert [state_of(pid) for pid in stuck] == ["D"]
        await server.until(lambda: reports(server, S.STOPPED))
        proof = reports(server, S.STOPPED)[0].proof
        assert proof is not None
        assert proof.kind is ProofKind.UNKILLABLE
        assert f"{stuck[0]}/{stuck[0]} in state D in request_wait_answer" in proof.evidence
        # Nothing else of the job starts here, whatever is ordered.
        server.order([agent.assignment(P.STOP), agent.assignment(P.PREPARE, generation=2)])
        await server.until(lambda: reports(server, S.PREPARED, 2))
        port = reports(server, S.PREPARED, 2)[0].master_port
        server.order([agent.assignment(P.STOP), agent.assignment(P.RUN, generation=2, port=port)])
        # The next life of the agent comes to the same end.
        await agent.kill()
        told = len(reports(server, S.STOPPED))
        await agent.start()
        await server.until(lambda: len(reports(server, S.STOPPED)) > told)
        last = reports(server, S.STOPPED)[-1].proof
        assert last is not None
        assert last.kind is ProofKind.UNKILLABLE
        assert not reports(server, S.RUNNING, 2)
        server.order([agent.assignment(P.STOP), agent.assignment(P.STOP, generation=2)])
        await server.until(lambda: reports(server, S.STOPPED, 2))
    # The file system is gone, and with it the wait: now it is really over, and that is told as well.
    await server.until(lambda: reports(server, S.STOPPED)[-1].proof.kind is kind)  # type: ignore[union-attr]
    assert not agent.marked()


async def test_a_stuck_process_beside_a_living_one_proves_nothing(
    server: FakeAgentServer, agent: AgentProcess, tmp_path: Path
) -> None:
    """What can still run is not called stuck, though it cannot be killed for another reason: it is out of reach."""
    agent.more = ("--no-cgroup",)
    with hung_file(tmp_path / "hung") as path:
        await agent.start()
        await run_generation(agent, STUB_HANG=str(path))
        await server.until(lambda: 3 in steps(server))
        # A process that carries the mark and is always there anew, for as long as the flag stands.
        flag = tmp_path / "flag"
        flag.touch()
        record = json.loads((agent.state / "runs/job-1/1.json").read_text())
        spawner = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            f'while [ -e {flag} ]; do env EVERSTEP_MARK="{record["mark"]}" sleep 600; done',
        )
        try:
            server.order([agent.assignment(P.STOP)])
            await server.until(lambda: len(reports(server, S.STOPPING)) >= 2, within_s=30)
            await asyncio.sleep(2.0)
            assert not reports(server, S.STOPPED)
        finally:
            flag.unlink()
        await spawner.wait()
        await server.until(lambda: reports(server, S.STOPPED), within_s=30)


async def test_a_boot_since_is_proof_and_needs_no_look(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent)
    await server.until(lambda: steps(server))
    await agent.kill()
    for pid in agent.marked():
        os.kill(pid, signal.SIGKILL)
    path = agent.state / "runs/job-1/1.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "boot_id": "another-boot"}))
    await agent.start()
    await server.until(lambda: reports(server, S.STOPPED))
    stopped = reports(server, S.STOPPED)[0]
    assert stopped.proof is not None
    assert stopped.proof.kind is ProofKind.BOOT_CHANGED
    assert "another-boot" in stopped.proof.evidence
    assert stopped.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert stopped.reason == "runner"


async def test_deaths_on_order_are_no_news_for_the_next_life_either(
    server: FakeAgentServer, agent: AgentProcess
) -> None:
    await agent.start()
    await run_generation(agent)
    await server.until(lambda: steps(server))
    await proof_of(server, agent)
    await agent.kill()
    await agent.start()
    await server.until(lambda: len(reports(server, S.STOPPED)) >= 2)
    assert not server.heard(RankExited)
