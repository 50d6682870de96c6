"""A fleet that tells ingest what real agents would: the integration tests' way to play a story without processes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from agents.protocol.messages import (
    AssignmentReport,
    CheckpointSaved,
    FromAgent,
    Hello,
    NodeFacts,
    ProofKind,
    RankExited,
    RankFinished,
    RankResumed,
    RankStarted,
    SeenPhase,
    StepReport,
    StepReports,
    StopProof,
)
from recovery import ingest, sessions
from recovery.models import Node

DIGEST = {"model": "m1", "optimizer": "o1", "scheduler": "s1", "sampler": "p1", "rng": "r1"}


@dataclass
class ToldNode:
    """One node's side of the conversation."""

    name: str
    row: Node
    session: str
    seq: int = 0

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

    @classmethod
    def of(cls, job: str, *names: str) -> ToldFleet:
        fleet = cls(job=job)
        for name in names:
            row, _ = Node.objects.get_or_create(name=name, defaults={"joined_at": time.time()})
            hello = Hello(
                protocol=1, agent_version="0.1.0", node=name, boot_id=f"boot-{name}", outbox_id=f"box-{name}-{job}",
                facts=NodeFacts(slots=1, gpu_model="Simulated GPU", gpu_count=1),
            )  # fmt: skip
            sessions.begin_session(row.pk, hello, session=f"ses-{name}")
            fleet.nodes[name] = ToldNode(name=name, row=row, session=f"ses-{name}")
        return fleet

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

    def train(self, name: str, generation: int, rank: int, steps: range, *, shift: float = 0.0) -> None:
        self.nodes[name].tell(
            StepReports(
                job=self.job,
                generation=generation,
                steps=[
                    StepReport(
                        rank=rank, step=s, at=time.time(), loss=5.0 / s + shift, learning_rate=1e-3, grad_norm=1.0,
                        span_start=8 * (s - 1), span_stop=8 * s,
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
        self, name: str, generation: int, rank: int, *, signal: int | None = 9, exit_code: int | None = None
    ) -> None:
        self.nodes[name].tell(
            RankExited(
                job=self.job, generation=generation, rank=rank, pid=1000 + rank, at=time.time(), signal=signal,
                exit_code=exit_code,
            )
        )  # fmt: skip

    def finish(self, name: str, generation: int, rank: int, *, step: int = 100) -> None:
        self.nodes[name].tell(
            RankFinished(job=self.job, generation=generation, rank=rank, step=step, at=time.time()),
            RankExited(
                job=self.job, generation=generation, rank=rank, pid=1000 + rank, at=time.time(), exit_code=0
            ),
        )  # fmt: skip
