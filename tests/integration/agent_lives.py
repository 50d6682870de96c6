"""What tests of the agent's life share: asking the fake server what it was told, and running a generation."""

from __future__ import annotations

from pathlib import Path

from agents.protocol.messages import (
    AssignmentPhase,
    AssignmentReport,
    LeaseTerms,
    OutboxGap,
    RankStarted,
    SeenPhase,
    StepReports,
)
from tests.fakes.agent_process import AgentProcess
from tests.fakes.agent_server import FakeAgentServer


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


def gaps(server: FakeAgentServer) -> list[str]:
    return [message.reason for message in server.messages if isinstance(message, OutboxGap)]


async def run_generation(
    agent: AgentProcess, *, generation: int = 1, lease: LeaseTerms | None = None, **environment: str
) -> None:
    """Take one generation through both phases until its ranks run."""
    server = agent.server
    server.order([agent.assignment(AssignmentPhase.PREPARE, generation=generation, lease=lease, **environment)])
    await server.until(lambda: reports(server, SeenPhase.PREPARED, generation))
    port = reports(server, SeenPhase.PREPARED, generation)[0].master_port
    server.order([agent.assignment(AssignmentPhase.RUN, generation=generation, port=port, lease=lease, **environment)])
    await server.until(lambda: server.heard(RankStarted) and reports(server, SeenPhase.RUNNING, generation))


def state_of(pid: int) -> str:
    """The process's state as /proc shows it, empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
