"""The agent's part in the lease: what it writes for runner and ranks, when, and what it tells of it."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import struct
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from agents.protocol.messages import Assignment, AssignmentPhase, Heartbeat, LeaseTerms, Phase, RankPhase, SeenPhase
from tests.fakes.agent_process import PROJECT, AgentProcess
from tests.fakes.agent_server import FakeAgentServer
from tests.fakes.hung_files import hung_file
from tests.integration.agent_lives import reports, run_generation, state_of, steps

P = AssignmentPhase
S = SeenPhase
TERMS = LeaseTerms(setup_s=100.0, compile_s=200.0, step_s=15.0, save_s=30.0, evaluation_s=30.0)


@pytest.fixture
async def server() -> AsyncIterator[FakeAgentServer]:
    server = FakeAgentServer()
    server.grants_lease = True
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def agent(server: FakeAgentServer, tmp_path: Path) -> AsyncIterator[AgentProcess]:
    agent = AgentProcess(server, tmp_path)
    yield agent
    agent.clean_up()


def directory(agent: AgentProcess) -> Path:
    return agent.state / "runs/job-1/1"


def contact_s(agent: AgentProcess) -> float:
    return contact_in(directory(agent))


def neighbour(agent: AgentProcess, phase: AssignmentPhase, *, port: int | None = None) -> Assignment:
    return msgspec.structs.replace(agent.assignment(phase, port=port, lease=TERMS), job="job-2", plan_id="plan-of-2")


def contact_in(run: Path) -> float:
    return float(struct.unpack("<Q", (run / "contact").read_bytes())[0]) / 1e9


def boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def test_gives_runner_and_ranks_their_files(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, lease=TERMS)
    launch = json.loads((directory(agent) / "launch.json").read_text())
    assert launch["protocol"] == 2
    files = [directory(agent) / name for name in ("contact", "progress", "lease.json")]
    assert [launch[name] for name in ("contact", "progress", "lease")] == [str(path) for path in files]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert (directory(agent) / "progress").stat().st_size == 16
    assert json.loads(files[2].read_text())["setup_s"] == 100.0
    environment = Path(f"/proc/{agent.marked()[0]}/environ").read_bytes()
    assert f"EVERSTEP_CONTACT={files[0]}".encode() in environment
    told = reports(server, S.RUNNING)[0]
    assert told.keeps_lease
    assert told.launch is not None
    assert told.launch.argv == [sys.executable, "train.py"]
    assert told.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def test_contact_is_when_a_granted_heartbeat_was_sent(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, lease=TERMS)
    beats = len(server.beats)
    await server.until(lambda: len(server.beats) > beats + 2)
    offset_s = time.time() - boottime_s()
    seen: list[float] = []
    for _ in range(20):
        await asyncio.sleep(0.05)
        seen.append(contact_s(agent))
        assert seen[-1] <= boottime_s()
        sent = [message.at - offset_s for message in server.transient if isinstance(message, Heartbeat)]
        assert any(abs(at - seen[-1]) < 0.01 for at in sent), "the time that a heartbeat says of its own sending"
    assert len(set(seen)) > 2
    assert seen == sorted(seen)


async def test_without_a_grant_contact_stands_still(server: FakeAgentServer, agent: AgentProcess) -> None:
    server.grants_lease = False
    before = boottime_s()
    await agent.start()
    await run_generation(agent, lease=TERMS)
    started = contact_s(agent)
    assert before < started < boottime_s(), "at the launch it is the hello that the server has answered"
    beats = len(server.beats)
    await server.until(lambda: len(server.beats) > beats + 3)
    assert contact_s(agent) == started
    server.grants_lease = True
    beats = len(server.beats)
    await server.until(lambda: len(server.beats) > beats + 3)
    assert contact_s(agent) > started


async def test_a_server_that_is_away_gives_no_contact(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, lease=TERMS)
    await server.stop()
    await asyncio.sleep(0.3)
    stands = contact_s(agent)
    await asyncio.sleep(1.0)
    assert contact_s(agent) == stands
    assert agent.marked(), "training goes on; it is the runner's to judge"


async def test_a_restarted_agent_goes_on_with_the_lease(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, lease=TERMS)
    await agent.kill()
    before = contact_s(agent)
    told = len(reports(server, S.RUNNING))
    await agent.start()
    await server.until(lambda: len(reports(server, S.RUNNING)) > told)
    assert reports(server, S.RUNNING)[-1].keeps_lease
    assert reports(server, S.RUNNING)[-1].launch is not None
    for _ in range(100):
        await asyncio.sleep(0.05)
        if contact_s(agent) > before:
            break
    assert before < contact_s(agent) <= boottime_s()


async def test_a_run_that_is_to_stop_gets_no_contact_and_its_neighbour_of_another_job_does(
    server: FakeAgentServer, agent: AgentProcess, tmp_path: Path
) -> None:
    """What is fenced by another word than its own agent's stays ordered to stop: nothing may renew its lease."""
    agent.more = ("--slots", "2")
    with hung_file(tmp_path / "hung") as path:
        await agent.start()
        await run_generation(agent, lease=TERMS, STUB_HANG=str(path))
        await server.until(lambda: 3 in steps(server))
        server.order([agent.assignment(P.STOP), neighbour(agent, P.PREPARE)])
        await server.until(lambda: [one for one in reports(server, S.PREPARED) if one.job == "job-2"])
        port = reports(server, S.PREPARED)[-1].master_port
        server.order([agent.assignment(P.STOP), neighbour(agent, P.RUN, port=port)])
        await server.until(lambda: reports(server, S.STOPPING))
        await server.until(lambda: [one for one in reports(server, S.RUNNING) if one.job == "job-2"])
        stopping, healthy = directory(agent), agent.state / "runs/job-2/1"
        stands, moves = contact_s(agent), contact_in(healthy)
        beats = len(server.beats)
        await server.until(lambda: len(server.beats) > beats + 4)
        assert [pid for pid in agent.marked() if state_of(pid) == "D"], "or this says nothing"
        assert contact_in(stopping) == stands
        assert contact_in(healthy) > moves
        # Not in its next life either, in which it finds both again.
        await agent.kill()
        await agent.start()
        beats = len(server.beats)
        await server.until(lambda: len(server.beats) > beats + 4)
        assert contact_in(stopping) == stands
        server.order([agent.assignment(P.STOP), neighbour(agent, P.STOP)])


async def test_a_lease_belongs_to_the_account_of_the_ranks(
    server: FakeAgentServer, agent: AgentProcess, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start ranks as somebody else")
    interpreter = Path("/usr/bin/python3")
    if not interpreter.exists() or not (PROJECT / "tests/fakes/stub_runner.py").stat().st_mode & 0o004:
        pytest.skip("there is no interpreter or no checkout that another user may read")
    agent.policy.write_text('allowed_users = ["nobody"]\n')
    for place in (tmp_path, *tmp_path.parents[:-2]):
        place.chmod(place.stat().st_mode | 0o055)
    agent.checkpoints.mkdir()
    agent.checkpoints.chmod(0o777)
    await agent.start()
    as_nobody = {"argv": [str(interpreter), "train.py"], "user": "nobody", "lease": TERMS}
    server.order([agent.assignment(P.PREPARE, **as_nobody)])
    await server.until(lambda: reports(server, S.PREPARED))
    port = reports(server, S.PREPARED)[0].master_port
    server.order([agent.assignment(P.RUN, port=port, **as_nobody)])
    await server.until(lambda: steps(server))
    owner = pwd.getpwnam("nobody").pw_uid
    raised = {**as_nobody, "lease": LeaseTerms(setup_s=900.0)}
    server.order([agent.assignment(P.RUN, port=port, **raised)])
    await server.until(lambda: json.loads((directory(agent) / "lease.json").read_text())["setup_s"] == 900.0)
    names = ("contact", "progress", "lease.json")
    assert {(directory(agent) / name).stat().st_uid for name in names} == {owner}
    await agent.kill()
    before = contact_s(agent)
    await agent.start()
    beats = len(server.beats)
    await server.until(lambda: len(server.beats) > beats + 3)
    assert contact_s(agent) > before


async def test_a_restarted_agent_writes_through_no_link(
    server: FakeAgentServer, agent: AgentProcess, tmp_path: Path
) -> None:
    await agent.start()
    await run_generation(agent, lease=TERMS)
    await agent.kill()
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (directory(agent) / "contact").unlink()
    (directory(agent) / "contact").symlink_to(precious)
    await agent.start()
    beats = len(server.beats)
    await server.until(lambda: len(server.beats) > beats + 3)
    assert precious.read_bytes() == b"precious"
    reached = max(steps(server))
    await server.until(lambda: max(steps(server)) > reached + 10)


async def test_terms_rise_with_the_order_and_stay_risen(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, lease=TERMS)
    path = directory(agent) / "lease.json"

    def with_terms(**changes: float) -> None:
        terms = LeaseTerms(**{name: getattr(TERMS, name) for name in TERMS.__struct_fields__} | changes)
        server.order([agent.assignment(P.RUN, port=1, lease=terms)])

    with_terms(step_s=60.0)
    await server.until(lambda: json.loads(path.read_text())["step_s"] == 60.0)
    with_terms(step_s=20.0, save_s=90.0)
    await server.until(lambda: json.loads(path.read_text())["save_s"] == 90.0)
    assert json.loads(path.read_text())["step_s"] == 60.0
    await agent.kill()
    await agent.start()
    with_terms(setup_s=500.0)
    await server.until(lambda: json.loads(path.read_text())["setup_s"] == 500.0)
    assert json.loads(path.read_text())["step_s"] == 60.0


async def test_without_terms_there_is_no_lease(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent)
    launch = json.loads((directory(agent) / "launch.json").read_text())
    assert [launch[name] for name in ("contact", "progress", "lease")] == [None, None, None]
    assert not (directory(agent) / "contact").exists()
    assert not reports(server, S.RUNNING)[0].keeps_lease
    assert b"EVERSTEP_CONTACT" not in Path(f"/proc/{agent.marked()[0]}/environ").read_bytes()


async def test_a_lease_that_ran_out_is_told_as_the_end(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, lease=TERMS, STUB_LEASE_EXPIRED="0.5")
    await server.until(lambda: reports(server, S.STOPPED))
    stopped = reports(server, S.STOPPED)[0]
    assert stopped.reason == "lease"
    assert stopped.detail == "its lease ran out after 21.2 s without contact and progress (limit 15.0 s)"
    assert stopped.proof is not None


async def test_tells_the_phases_of_ranks(server: FakeAgentServer, agent: AgentProcess) -> None:
    await agent.start()
    await run_generation(agent, STUB_PHASES="1")
    await server.until(lambda: len(server.heard(RankPhase)) >= 4)
    told = [message.phase for message in server.messages if isinstance(message, RankPhase)]
    assert told[:4] == [Phase.SAVE, Phase.STEP, Phase.SAVE, Phase.STEP]
    times = [message.at for message in server.messages if isinstance(message, RankPhase)]
    await agent.kill()
    await agent.start()
    await server.until(lambda: len(server.heard(RankPhase)) > len(times) + 2)
    times = [message.at for message in server.messages if isinstance(message, RankPhase)]
    assert len(set(times)) == len(times), "none is told twice by the next life"


def older_release(place: Path, *, protocol: int) -> str:
    """An everstep of another release in the job's environment, with the stub as its runner. Returns the PYTHONPATH."""
    package = place / "everstep" / "elastic"
    package.mkdir(parents=True)
    for init in (package / "__init__.py", package.parent / "__init__.py"):
        init.write_text("")
    (package / "launch.py").write_text(f"PROTOCOL = {protocol}\n")
    (package / "runner.py").write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(PROJECT / 'tests/fakes')!r})\n"
        f"sys.argv[0] = {str(PROJECT / 'tests/fakes/stub_runner.py')!r}\n"
        f"runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return str(place)


async def test_a_runner_of_the_older_release_runs_without_a_lease(
    server: FakeAgentServer, agent: AgentProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_RUNNER", "module")
    await agent.start()
    await run_generation(agent, lease=TERMS, PYTHONPATH=older_release(tmp_path / "old", protocol=1))
    launch = json.loads((directory(agent) / "launch.json").read_text())
    assert launch["protocol"] == 1
    assert "contact" not in launch
    assert not (directory(agent) / "contact").exists()
    assert not reports(server, S.RUNNING)[0].keeps_lease
    await server.until(lambda: steps(server))
    await agent.kill()
    told = len(reports(server, S.RUNNING))
    await agent.start()
    await server.until(lambda: len(reports(server, S.RUNNING)) > told)
    reached = max(steps(server))
    await server.until(lambda: max(steps(server)) > reached + 10)
    assert not reports(server, S.RUNNING)[-1].keeps_lease


async def test_a_runner_of_a_release_too_new_is_refused(
    server: FakeAgentServer, agent: AgentProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_RUNNER", "module")
    await agent.start()
    newer = older_release(tmp_path / "new", protocol=9)
    server.order([agent.assignment(P.PREPARE, PYTHONPATH=newer)])
    await server.until(lambda: reports(server, S.PREPARE_FAILED))
    failed = reports(server, S.PREPARE_FAILED)[0]
    assert failed.reason == "runner"
    assert "speaks protocols 9 to 9; this agent speaks 1 to 2" in failed.detail


async def test_a_record_of_the_older_agent_is_found_again(server: FakeAgentServer, agent: AgentProcess) -> None:
    """Before leases, records held no protocol and launches no files for one; such a run goes on as it is."""
    await agent.start()
    await run_generation(agent)
    await agent.kill()
    path = agent.state / "runs/job-1/1.json"
    record = json.loads(path.read_text())
    for name in ("protocol", "lease", "killed_at"):
        record.pop(name, None)
    path.write_text(json.dumps(record))
    (agent.state / "outbox.log").unlink()  # it kept none on disk
    before = sorted(agent.marked())
    await agent.start()
    await server.until(lambda: reports(server, S.RUNNING) and steps(server))
    assert sorted(agent.marked()) == before
    assert not reports(server, S.RUNNING)[-1].keeps_lease
    os.kill(record["pid"], 0)


async def test_the_real_runner_keeps_the_lease_of_an_agent_without_a_server(
    server: FakeAgentServer, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contact holds the ranks alive while it lasts, though they report nothing; without it they are killed."""
    monkeypatch.setenv("AGENT_RUNNER", "module")
    (agent.job_directory / "train.py").write_text("import time\ntime.sleep(600)\n")
    await agent.start()
    await run_generation(agent, lease=LeaseTerms(setup_s=5.0, compile_s=5.0, step_s=5.0, save_s=5.0, evaluation_s=5.0))
    assert json.loads((directory(agent) / "launch.json").read_text())["protocol"] == 2
    assert reports(server, S.RUNNING)[0].keeps_lease
    await asyncio.sleep(7.0)
    assert not reports(server, S.STOPPED)
    await server.stop()
    gone = time.monotonic()
    while agent.marked():
        assert time.monotonic() - gone < 20
        await asyncio.sleep(0.1)
    assert time.monotonic() - gone > 4.0
    await server.start()
    await server.until(lambda: reports(server, S.STOPPED))
    stopped = reports(server, S.STOPPED)[0]
    assert stopped.reason == "lease"
    assert stopped.detail.startswith("its lease ran out after ")
