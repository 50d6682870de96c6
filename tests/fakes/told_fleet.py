"""A fleet that tells ingest what real agents would: the integration tests' way to play a story without processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from agents.protocol.messages import (
    AssignmentReport,
    CheckpointSaved,
    FromAgent,
    Hello,
    HighestGeneration,
    NodeFacts,
    ProofKind,
    RankExited,
    RankFinished,
    RankResumed,
    RankStarted,
    SeenPhase,
    StateProbe,
    StepReport,
    StepReports,
    StopProof,
)
from recovery import ingest, sessions
from recovery.models import Node, Observer

OBSERVER = "obs-tests"
LEEWAY_S = 600.0
"""A beat is dated ahead and its lag taken off again: silences stay as they were told, however slow a test is."""

DIGEST = {"model": "m1", "optimizer": "o1", "scheduler": "s1", "sampler": "p1", "rng": "r1"}


@dataclass
class ToldNode:
    """One node's side of the conversation."""

    name: str
    row: Node
    session: str
    seq: int = 0
    connections: int = 1

    def tell(self, *facts: FromAgent) -> None:
        """Store facts as the consumer would, in one batch."""
        numbered = []
        for fact in facts:
            self.seq += 1
            numbered.append((self.seq, fact))
        ingest.store_facts(self.row.pk, numbered, session=self.session, offset_s=0.0)


@dataclass
class ToldFleet:
    """Nodes by name, and the words they use for one job."""

    job: str
    nodes: dict[str, ToldNode] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, job: str, *names: str) -> ToldFleet:
        fleet = cls(job=job)
        for name in names:
            fleet.connect(name)
        fleet.beat()
        return fleet

    def connect(self, name: str, *, boot: str = "", highest: list[HighestGeneration] | None = None) -> None:
        """A node says hello, for the first time or again."""
        row, _ = Node.objects.get_or_create(name=name, defaults={"joined_at": time.time()})
        hello = Hello(
            protocol=2, agent_version="0.2.0", node=name, boot_id=boot or f"boot-{name}",
            outbox_id=f"box-{name}-{self.job}", highest=highest or [],
            facts=NodeFacts(slots=1, gpu_model="Simulated GPU", gpu_count=1),
        )  # fmt: skip
        known = self.nodes.get(name)
        number = 1 if known is None else known.connections + 1
        session = f"ses-{name}-{number}"
        seq = sessions.begin_session(row.pk, hello, session=session, observer=OBSERVER)
        self.nodes[name] = ToldNode(name=name, row=row, session=session, seq=seq, connections=number)
        self.silent.discard(name)

    def beat(self) -> None:
        """The web process writes whom it hears: all but those that are silent."""
        now = time.time()
        heard = [
            sessions.Heard(node_id=node.row.pk, session=node.session, at=now, offset_s=None, seen_revision=0)
            for node in self.nodes.values()
            if node.name not in self.silent
        ]
        sessions.record_heard(heard, observer=OBSERVER, since=now - 3600.0, at=now + LEEWAY_S, lag_s=LEEWAY_S)

    def fall_silent(self, *names: str, for_s: float = 15.0) -> None:
        """Nodes that were last heard so many seconds ago, by an observer that listened all the while."""
        self.silent.update(names)
        Node.objects.filter(name__in=names).update(last_heard_at=time.time() - for_s)
        self.beat()

    def forget_observers(self) -> None:
        """As after a restart of the web process: nobody has listened yet."""
        Observer.objects.all().delete()

    def report(self, name: str, generation: int, plan_id: str, phase: SeenPhase, **more: object) -> None:
        proof = None
        if phase is SeenPhase.STOPPED:
            proof = StopProof(kind=ProofKind.CGROUP_EMPTY, at=time.time(), evidence="populated 0")
        self.nodes[name].tell(
            AssignmentReport(
                job=self.job, generation=generation, plan_id=plan_id, phase=phase, at=time.time(), proof=proof,
                fingerprint="same", **more,
            )
        )  # fmt: skip

    def start(
        self, name: str, generation: int, rank: int, *, step: int = 0, live: dict[str, str] | None = None
    ) -> None:
        saved = DIGEST if step else {}
        self.nodes[name].tell(
            RankStarted(job=self.job, generation=generation, rank=rank, pid=1000 + rank, at=time.time()),
            RankResumed(
                job=self.job, generation=generation, rank=rank, step=step, total_steps=100, at=time.time(),
                saved_digest=saved, live_digest=live or DIGEST, deterministic=True,
            ),
        )  # fmt: skip

    def train(
        self,
        name: str,
        generation: int,
        rank: int,
        steps: range,
        *,
        shift: float = 0.0,
        unmoved: Sequence[str] = (),
    ) -> None:
        """`unmoved`: parts that the first of the steps did not move, by its probe."""
        self.nodes[name].tell(
            StepReports(
                job=self.job,
                generation=generation,
                steps=[
                    StepReport(
                        rank=rank, step=s, at=time.time(), loss=5.0 / s + shift, learning_rate=1e-3, grad_norm=1.0,
                        span_start=8 * (s - 1), span_stop=8 * s,
                        probe=StateProbe(digests={}, unmoved=list(unmoved)) if s == steps[0] else None,
                    )
                    for s in steps
                ],
            )
        )  # fmt: skip

    def save(self, name: str, generation: int, step: int) -> None:
        self.nodes[name].tell(
            CheckpointSaved(
                job=self.job, generation=generation, step=step, at=time.time(), directory=f"/c/{generation}/{step}",
                size_bytes=10, world_size=2,
            )
        )  # fmt: skip

    def die(
        self,
        name: str,
        generation: int,
        rank: int,
        *,
        signal: int | None = 9,
        exit_code: int | None = None,
        detail: str = "",
    ) -> None:
        self.nodes[name].tell(
            RankExited(
                job=self.job, generation=generation, rank=rank, pid=1000 + rank, at=time.time(), signal=signal,
                exit_code=exit_code, detail=detail,
            )
        )  # fmt: skip

    def finish(self, name: str, generation: int, rank: int, *, step: int = 100) -> None:
        self.nodes[name].tell(
            RankFinished(job=self.job, generation=generation, rank=rank, step=step, at=time.time()),
            RankExited(
                job=self.job, generation=generation, rank=rank, pid=1000 + rank, at=time.time(), exit_code=0
            ),
        )  # fmt: skip
