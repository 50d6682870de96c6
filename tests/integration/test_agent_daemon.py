"""The agent as a process against a server that speaks the real protocol: joining, running, stopping, coming back."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agents.protocol.errors import CloseCode
from agents.protocol.messages import (
    AssignmentPhase,
    AssignmentReport,
    CheckpointSaved,
    FaultKind,
    FaultOrder,
    FaultReport,
    FaultState,
    GpuSamples,
    Heartbeat,
    ProofKind,
    RankExited,
    RankFinished,
    RankResumed,
    RankStarted,
    SeenPhase,
    StepReports,
)
from agents.supervisor.cgroups import NodeGroups
from tests.fakes.agent_process import AgentProcess
from tests.fakes.agent_server import FakeAgentServer

P = AssignmentPhase
S = SeenPhase


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


def reports(server: FakeAgentServer, phase: SeenPhase, generation: int = 1) -> list[AssignmentReport]:
    return [
        message
        for message in server.messages
        if isinstance(message, AssignmentReport) and (message.phase, message.generation) == (phase, generation)
    ]


def steps(server: FakeAgentServer, *, rank: int = 0, generation: int = 1) -> list[int]:
    return [
        step.step
        for message in server.messages
        if isinstance(message, StepReports) and message.generation == generation
        for step in message.steps
        if step.rank == rank
    ]


async def run_generation(agent: AgentProcess, *, generation: int = 1, **environment: str) -> None:
    """Take one generation through both phases until its ranks run."""
    server = agent.server
    server.order([agent.assignment(P.PREPARE, generation=generation, **environment)])
    await server.until(lambda: reports(server, S.PREPARED, generation))
    port = reports(server, S.PREPARED, generation)[0].master_port
    assert port is not None
    server.order([agent.assignment(P.RUN, generation=generation, port=port, **environment)])
    await server.until(lambda: server.heard(RankStarted) and reports(server, S.RUNNING, generation))


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- Joining and the connection ---


async def test_exchanges_the_join_token_once_and_keeps_the_credential_to_itself(
    server: FakeAgentServer, agent: AgentProcess
) -> None:
    await agent.start()
    assert [join["node"] for join in server.joins] == ["gpu-01"]
    credential = agent.state / "credential.json"
    assert stat.S_IMODE(credential.stat().st_mode) == 0o600
    await agent.kill()
    await agent.start()
    assert len(server.joins) == 1
    log = agent.log.read_text()
    assert server.credentials["gpu-01"] not in log
    assert "a-join-token" not in log


async def test_says_what_the_node_is_and_beats_and_samples(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    hello = server.hellos[0]
    assert hello.node == "gpu-01"
    assert hello.facts.gpu_count == 1
    assert hello.facts.simulated_gpus
    assert hello.facts.slots == 1
    await server.until(lambda: sum(isinstance(m, Heartbeat) for m in server.transient) >= 3)
    await server.until(lambda: any(isinstance(m, GpuSamples) for m in server.transient))


async def test_resends_without_loss_or_repeat_after_lost_connections(
    server: FakeAgentServer, agent: AgentProcess
) -> None:
    await agent.start()
    await run_generation(agent)
    for cut in range(3):
        server.acknowledges = cut % 2 == 0
        reached = len(steps(server))
        await server.until(lambda reached=reached: len(steps(server)) > reached + 10)
        server.drop_connections()
        hellos = len(server.hellos)
        await server.until(lambda hellos=hellos: len(server.hellos) > hellos)
    server.acknowledges = True
    reached = max(steps(server), default=0)
    await server.until(lambda: max(steps(server), default=0) > reached + 10)
    assert steps(server) == list(range(1, max(steps(server)) + 1))
    sequence = [seq for _, seq, _ in server.durable]
    assert sequence == list(range(1, len(sequence) + 1))
    assert not server.errors


async def test_tells_all_its_runs_again_after_each_hello(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent)
    told = len(reports(server, S.RUNNING))
    server.drop_connections()
    await server.until(lambda: len(reports(server, S.RUNNING)) > told)


async def test_comes_back_when_the_server_does(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await server.stop()
    await asyncio.sleep(0.5)
    hellos = len(server.hellos)
    await server.start()
    await server.until(lambda: len(server.hellos) > hellos)


async def test_retries_slowly_when_its_version_is_refused(server: FakeAgentServer, agent: AgentProcess) -> None:
    server.refuse_with = CloseCode.UNSUPPORTED_VERSION
    await agent.start()
    await asyncio.sleep(0.45)
    assert len(server.hellos) == 1
    server.refuse_with = None
    await server.until(lambda: len(server.hellos) > 1)
    assert "an operator has to act" in agent.log.read_text()


async def test_joins_anew_when_the_server_has_forgotten_it(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    server.credentials.clear()
    hellos = len(server.hellos)
    server.drop_connections()
    await server.until(lambda: len(server.hellos) > hellos)
    assert len(server.joins) == 2


async def test_refuses_to_share_its_state_with_a_second_agent(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    second = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agents", "--server", server.url, "--name", "gpu-01", "--state", str(agent.state)),
        stderr=asyncio.subprocess.PIPE,
    )
    _, words = await second.communicate()
    assert second.returncode == 2
    assert b"Another agent uses" in words


# --- Running ---


async def test_runs_a_generation_to_its_normal_end(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, STUB_STEPS="45")
    await server.until(lambda: reports(server, S.STOPPED))
    assert server.phases()[:3] == [S.PREPARING, S.PREPARED, S.RUNNING]
    prepared = reports(server, S.PREPARED)[0]
    assert prepared.fingerprint
    assert set(prepared.fingerprint_parts) >= {"argv", "environment", "script", "torch", "GPU driver"}
    assert steps(server) == list(range(1, 46))
    assert [saved.step for saved in server.heard(CheckpointSaved)] == [20, 40]
    assert server.heard(RankResumed)[0].total_steps == 45
    kinds = [type(message) for message in server.messages]
    last_steps = max(index for index, kind in enumerate(kinds) if kind is StepReports)
    assert last_steps < kinds.index(RankFinished) < kinds.index(RankExited)
    exited = server.heard(RankExited)[0]
    assert (exited.exit_code, exited.signal) == (0, None)
    stopped = reports(server, S.STOPPED)[0]
    assert stopped.proof is not None
    assert stopped.reason == ""


async def test_tells_a_death_at_once_and_after_its_steps(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, STUB_EXIT="7", STUB_MUTE="1")
    await server.until(lambda: server.heard(RankExited))
    # The rank sent nothing: what it did is taken from its own log, and stands before its death all the same.
    assert steps(server) == [1, 2, 3]
    kinds = [type(message) for message in server.messages]
    assert kinds.index(RankResumed) < kinds.index(StepReports) < kinds.index(RankExited)
    assert server.heard(RankExited)[0].exit_code == 7


async def test_reports_a_killed_runner_with_words_and_proof(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent)
    record = json.loads((agent.state / "runs/job-1/1.json").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    await server.until(lambda: reports(server, S.STOPPED))
    stopped = reports(server, S.STOPPED)[0]
    assert stopped.reason == "runner"
    assert "signal 9" in stopped.detail
    assert stopped.proof is not None
    assert stopped.proof.killed >= 1
    assert not agent.marked()


@pytest.mark.parametrize("kind", [ProofKind.CGROUP_EMPTY, ProofKind.PROC_SCAN_EMPTY])
async def test_stop_kills_a_grandchild_that_hides_from_everything_gentle(
    kind: ProofKind, server: FakeAgentServer, agent: AgentProcess, tmp_path: Path
) -> None:
    if kind is ProofKind.PROC_SCAN_EMPTY:
        agent.more = ("--no-cgroup",)
    else:
        groups = NodeGroups.find("probe", tmp_path)
        if groups is None:
            pytest.skip("cgroup v2 is not writable here; the other case is what happens then")
        groups.leave()
    ghost_note = tmp_path / "ghost"
    await agent.start()
    await run_generation(agent, STUB_GHOST=str(ghost_note))
    await server.until(lambda: ghost_note.exists() and ghost_note.read_text() and steps(server))
    ghost = int(ghost_note.read_text())
    assert exists(ghost)
    server.order([agent.assignment(P.STOP)])
    await server.until(lambda: reports(server, S.STOPPED))
    proof = reports(server, S.STOPPED)[0].proof
    assert proof is not None
    assert not exists(ghost)
    assert not agent.marked()
    assert proof.killed >= 2, "runner and ghost; the rank may die of the runner's death before it is counted"
    assert proof.kind is kind
    assert not server.heard(RankExited)


async def test_stop_before_run_is_proven_as_never_started_and_stays_so(
    server: FakeAgentServer, agent: AgentProcess
) -> None:
    await agent.start()
    server.order([agent.assignment(P.PREPARE)])
    await server.until(lambda: reports(server, S.PREPARED))
    port = reports(server, S.PREPARED)[0].master_port
    server.order([agent.assignment(P.STOP)])
    await server.until(lambda: reports(server, S.STOPPED))
    proof = reports(server, S.STOPPED)[0].proof
    assert proof is not None
    assert proof.kind is ProofKind.NEVER_STARTED
    # The order to run was on its way all the time.
    server.order([agent.assignment(P.RUN, port=port)])
    await server.until(
        lambda: any(isinstance(m, Heartbeat) and m.revision == server.revision for m in server.transient)
    )
    await asyncio.sleep(0.3)
    assert S.RUNNING not in server.phases()
    assert not agent.marked()


async def test_does_not_run_the_next_generation_while_the_old_one_lives(
    server: FakeAgentServer, agent: AgentProcess
) -> None:
    await agent.start()
    await run_generation(agent)
    server.order([agent.assignment(P.PREPARE, generation=2)])
    await server.until(lambda: reports(server, S.PREPARED, 2))
    port = reports(server, S.PREPARED, 2)[0].master_port
    server.order([agent.assignment(P.RUN, generation=2, port=port)])
    await asyncio.sleep(0.5)
    assert S.RUNNING not in server.phases(2)
    server.order([agent.assignment(P.STOP), agent.assignment(P.RUN, generation=2, port=port)])
    await server.until(lambda: reports(server, S.RUNNING, 2))
    assert not agent.marked("job-1:1:")


async def test_refuses_root_ranks_unless_its_policy_says_so(server: FakeAgentServer, agent: AgentProcess) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be refused to run ranks as root")
    agent.policy.write_text("")
    await agent.start()
    server.order([agent.assignment(P.PREPARE)])
    await server.until(lambda: reports(server, S.REFUSED))
    report = reports(server, S.REFUSED)[0]
    assert report.reason == "policy"
    assert "allow_root = true" in report.detail


async def test_runs_ranks_as_the_user_of_the_job(server: FakeAgentServer, agent: AgentProcess, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start ranks as somebody else")
    agent.policy.write_text('allowed_users = ["nobody"]\n')
    interpreter = "/usr/bin/python3"
    if not Path(interpreter).exists():
        pytest.skip("there is no interpreter that another user may start")
    for place in (tmp_path, *tmp_path.parents[:-2]):
        place.chmod(place.stat().st_mode | 0o055)
    agent.checkpoints.mkdir(mode=0o777)
    agent.checkpoints.chmod(0o777)
    stub = Path(__file__).parents[1] / "fakes/stub_runner.py"
    if not readable_by_all(stub):
        pytest.skip("this checkout is not readable for other users")
    await agent.start()
    keywords = {"argv": [interpreter, "train.py"], "user": "nobody"}
    server.order([agent.assignment(P.PREPARE, **keywords)])
    await server.until(lambda: reports(server, S.PREPARED))
    port = reports(server, S.PREPARED)[0].master_port
    server.order([agent.assignment(P.RUN, port=port, **keywords)])
    await server.until(lambda: steps(server))
    owners = {Path(f"/proc/{pid}").stat().st_uid for pid in agent.marked()}
    assert owners == {pwd.getpwnam("nobody").pw_uid}


def readable_by_all(path: Path) -> bool:
    return all(place.stat().st_mode & 0o005 for place in (path, *path.parents))


async def test_reports_what_is_missing_on_this_node(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    server.order([agent.assignment(P.PREPARE, parent=(1, 20), generation=2)])
    await server.until(lambda: reports(server, S.PREPARE_FAILED, 2))
    assert reports(server, S.PREPARE_FAILED, 2)[0].reason == "checkpoint"
    server.order([agent.assignment(P.PREPARE, generation=3, argv=["/no/such/python", "train.py"])])
    await server.until(lambda: reports(server, S.PREPARE_FAILED, 3))
    assert reports(server, S.PREPARE_FAILED, 3)[0].reason == "interpreter"
    server.order([agent.assignment(P.STOP, generation=3)])
    await server.until(lambda: reports(server, S.STOPPED, 3))
    server.order([agent.assignment(P.PREPARE, generation=4, ranks=2)])
    await server.until(lambda: reports(server, S.PREPARE_FAILED, 4))
    assert reports(server, S.PREPARE_FAILED, 4)[0].reason == "slots"


# --- Lives of the agent ---


async def test_a_restarted_agent_goes_on_with_its_run(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent)
    await server.until(lambda: max(steps(server), default=0) >= 10)
    before = agent.marked()
    await agent.kill()
    await asyncio.sleep(0.3)
    assert sorted(agent.marked()) == sorted(before)
    await agent.start()
    reached = max(steps(server))
    await server.until(lambda: max(steps(server)) > reached + 20)
    assert sorted(set(steps(server))) == list(range(1, max(steps(server)) + 1))
    server.order([agent.assignment(P.STOP)])
    await server.until(lambda: reports(server, S.STOPPED))
    assert not agent.marked()


async def test_a_restarted_agent_tells_what_happened_meanwhile(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, STUB_STEPS="30")
    await agent.kill()
    while agent.marked():
        await asyncio.sleep(0.05)
    await agent.start()
    await server.until(lambda: reports(server, S.STOPPED))
    assert server.heard(RankFinished)[-1].step == 30
    assert server.heard(RankExited)[-1].exit_code == 0
    assert sorted(set(steps(server))) == list(range(1, 31))


async def test_refuses_an_older_generation_also_after_a_restart(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    server.order([agent.assignment(P.PREPARE, generation=5)])
    await server.until(lambda: reports(server, S.PREPARED, 5))
    await agent.kill()
    await agent.start()
    assert [(known.job, known.generation) for known in server.hellos[-1].highest] == [("job-1", 5)]
    server.order([agent.assignment(P.PREPARE, generation=4)])
    await server.until(lambda: reports(server, S.REFUSED, 4))
    assert reports(server, S.REFUSED, 4)[0].reason == "older_generation"
    server.order([agent.assignment(P.PREPARE, generation=5, plan_id="another-plan")])
    await server.until(lambda: any(r.plan_id == "another-plan" for r in reports(server, S.REFUSED, 5)))


async def test_training_outlives_an_agent_that_ends_in_good_order(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent)
    assert await agent.end() == 0
    assert agent.marked()


async def test_kills_its_runs_at_its_end_only_if_told_so(server: FakeAgentServer, tmp_path: Path) -> None:
    agent = AgentProcess(server, tmp_path, more=("--stop-runs-on-exit",))
    try:
        await agent.start()
        await run_generation(agent)
        assert await agent.end() == 0
        assert not agent.marked()
    finally:
        agent.clean_up()


# --- The drill ---


def drill(name: str = "drill-1", *, rank: int = 0, steps_after_save: int = 5, not_after: float = 4e9) -> FaultOrder:
    return FaultOrder(
        drill=name,
        kind=FaultKind.KILL_RANK,
        job="job-1",
        generation=1,
        rank=rank,
        not_after=not_after,
        steps_after_save=steps_after_save,
    )


def fault_states(server: FakeAgentServer) -> list[FaultState]:
    return [message.state for message in server.messages if isinstance(message, FaultReport)]


async def test_kills_a_rank_five_steps_after_a_save_and_never_again(
    server: FakeAgentServer, agent: AgentProcess
) -> None:
    await agent.start()
    await run_generation(agent)
    running = agent.assignment(P.RUN, port=1)
    server.order([running], faults=[drill()])
    server.order([running], faults=[drill()])
    await server.until(lambda: FaultState.APPLIED in fault_states(server))
    await server.until(lambda: server.heard(RankExited))
    exited = server.heard(RankExited)[0]
    assert exited.signal == signal.SIGKILL
    assert fault_states(server) == [FaultState.ARMED, FaultState.APPLIED]
    reached = max(steps(server))
    saved = max(saved.step for saved in server.heard(CheckpointSaved))
    assert reached - saved >= 5
    # Ordered once more, for a new generation's sake renamed in nothing: also a restarted agent does not do it again.
    await server.until(lambda: reports(server, S.STOPPED))
    await agent.kill()
    await agent.start()
    server.order([], faults=[drill()])
    await server.until(lambda: len(fault_states(server)) >= 3)
    assert fault_states(server)[2:] == [FaultState.APPLIED]


async def test_an_armed_drill_survives_a_restart_and_is_applied_once(
    server: FakeAgentServer, agent: AgentProcess
) -> None:
    await agent.start()
    await run_generation(agent, STUB_SAVE_EVERY="40")
    server.order([agent.assignment(P.RUN, port=1)], faults=[drill(steps_after_save=10)])
    await server.until(lambda: FaultState.ARMED in fault_states(server))
    await agent.kill()
    await agent.start()
    await server.until(lambda: FaultState.APPLIED in fault_states(server))
    await server.until(lambda: server.heard(RankExited))
    assert fault_states(server).count(FaultState.APPLIED) == 1


async def test_refuses_and_lets_expire_what_it_cannot_or_may_not_do(
    server: FakeAgentServer, agent: AgentProcess
) -> None:
    await agent.start()
    await run_generation(agent)
    server.clock_offset_s = 3600.0  # the node's clock is an hour behind: the deadline is the server's
    server.drop_connections()
    hellos = len(server.hellos)
    await server.until(lambda: len(server.hellos) > hellos)
    orders = [drill("late", not_after=time.time() + 60), drill("foreign", rank=9)]
    server.order([agent.assignment(P.RUN, port=1)], faults=orders)
    await server.until(lambda: len(fault_states(server)) >= 2)
    told = {message.drill: message for message in server.messages if isinstance(message, FaultReport)}
    assert told["late"].state is FaultState.EXPIRED
    assert told["foreign"].state is FaultState.REFUSED
    assert not server.heard(RankExited)


async def test_a_withdrawn_drill_is_not_applied(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, STUB_SAVE_EVERY="100000")
    running = agent.assignment(P.RUN, port=1)
    server.order([running], faults=[drill(steps_after_save=1)])
    await server.until(lambda: fault_states(server) == [FaultState.ARMED])
    server.order([running])
    await server.until(lambda: fault_states(server) == [FaultState.ARMED, FaultState.EXPIRED])


async def test_a_generation_that_ended_by_itself_never_runs_again(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, STUB_STEPS="3")
    await server.until(lambda: reports(server, S.STOPPED))
    late = server.current_order()
    server.order([])
    await asyncio.sleep(0.2)
    await agent.kill()
    await agent.start()
    server.order(late.assignments)
    await server.until(lambda: reports(server, S.REFUSED) or len(reports(server, S.STOPPED)) > 1)
    await asyncio.sleep(0.3)
    assert len(server.heard(RankStarted)) <= 2  # told again by the restarted agent, not started again
    assert len({started.pid for started in server.heard(RankStarted)}) == 1
    assert not agent.marked()
