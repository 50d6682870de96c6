"""The kinds of drills as a table: what each breaks, for how long, and what it promises. Guards and judges read it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agents.protocol.messages import FaultKind

LONGEST_S = 600.0


class Target(StrEnum):
    """What a drill breaks."""

    RANK = "rank"
    NODE = "node"
    SERVER = "server"


class PromiseKind(StrEnum):
    """What is held to be true of a drill's end."""

    RECOVERED = "recovered"
    """The job goes on from a checkpoint, within a time, with continuity proven."""
    UNHARMED = "unharmed"
    """The job does not notice: no step, no event and no time is lost, and no incident is opened against it."""


@dataclass(frozen=True, kw_only=True)
class DrillKind:
    """One way to break something."""

    name: str
    what: str
    """A sentence or two for a person who is about to do it."""
    target: Target
    promise: PromiseKind
    duration_s: float = 0.0
    """Unless another is asked for; 0: there is nothing that lasts."""
    longest_s: float = LONGEST_S
    protocol: int = 2
    """The oldest wire protocol of an agent that can do it."""

    @property
    def lasts(self) -> bool:
        """Whether a duration can be chosen."""
        return self.duration_s > 0

    @property
    def is_undone(self) -> bool:
        """Whether somebody reports that it is over."""
        return self.target is not Target.RANK

    @property
    def takes_node(self) -> bool:
        """Whether the job loses a whole node to it."""
        return self.target is Target.NODE and self.promise is PromiseKind.RECOVERED


SERVER_DOWN = "server-down"

KINDS: dict[str, DrillKind] = {
    kind.name: kind
    for kind in (
        DrillKind(
            name=FaultKind.KILL_RANK.value,
            what="Kills one rank of a running job with SIGKILL, as a crash or the kernel's OOM killer would.",
            target=Target.RANK,
            promise=PromiseKind.RECOVERED,
            protocol=1,
        ),
        DrillKind(
            name=FaultKind.KILL_AGENT.value,
            what="Kills the agent, the runner and all ranks of one node, as a power cut would. "
            "The agent stays down until the time is over.",
            target=Target.NODE,
            promise=PromiseKind.RECOVERED,
            duration_s=90.0,
        ),
        DrillKind(
            name=FaultKind.RESTART_AGENT.value,
            what="Kills the agent of one node alone, as an upgrade or a crash would. It is started again at once.",
            target=Target.NODE,
            promise=PromiseKind.UNHARMED,
        ),
        DrillKind(
            name=FaultKind.FREEZE_NODE.value,
            what="Stops the agent, the runner and all ranks of one node with SIGSTOP: nothing of it is heard, and "
            "nothing has died. They go on once the time is over.",
            target=Target.NODE,
            promise=PromiseKind.RECOVERED,
            duration_s=75.0,
        ),
        DrillKind(
            name=FaultKind.PARTITION.value,
            what="Cuts the agent of one node from the server. Its ranks still meet those of other nodes.",
            target=Target.NODE,
            promise=PromiseKind.UNHARMED,
            duration_s=30.0,
        ),
        DrillKind(
            name=FaultKind.ISOLATE_NODE.value,
            what="Cuts one node from everything: its agent from the server, and its ranks from those of other nodes.",
            target=Target.NODE,
            promise=PromiseKind.RECOVERED,
            duration_s=75.0,
        ),
        DrillKind(
            name=SERVER_DOWN,
            what="Kills the web, worker and beat processes of this server and keeps them down until the time is over.",
            target=Target.SERVER,
            promise=PromiseKind.UNHARMED,
            duration_s=30.0,
            longest_s=120.0,
        ),
    )
}
