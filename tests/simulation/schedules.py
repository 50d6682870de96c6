"""A schedule: two jobs, a handful of nodes, and faults at chosen moments. All of it follows from (seed, index)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

CALM_AFTER_S = 110.0
"""From here on nothing new breaks: nodes come back, armed faults are disarmed."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that goes wrong or is asked for. `when` arms it: it fires once the job enters a state of that name."""

    at: float
    kind: str
    job: str = ""
    node: str = ""
    rank: int = 0
    value: int = 0
    text: str = ""
    seconds: float = 0.0
    when: str = ""

    def __str__(self) -> str:
        parts = [f"{name}={value!r}" for name, value in vars(self).items() if value and name not in ("at", "kind")]
        return f"{self.at:7.2f} s  {self.kind}  {' '.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class JobShape:
    id: str
    node_count: int
    ranks_per_node: int
    total_steps: int
    save_every: int
    step_time_s: float
    submitted_at: float
    reports_digests: bool = True
    saves_step_0: bool = True
    setup_s: float = 1.0
    """Its ranks take at most so long until they enter their loop."""
    save_time_s: float = 0.0
    evaluates_s: float = 0.0
    """After each save, without a word between the ranks; 0: never."""
    min_nodes: int | None = None
    keeps_lease: bool = True
    """Its runners speak a protocol in which they do."""


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    name: str
    rack: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    seed: int
    index: int
    nodes: tuple[NodeShape, ...]
    jobs: tuple[JobShape, ...]
    events: tuple[Event, ...]
    noise: float
    """0: a fast network that loses nothing and a worker that is never slow; 1: neither."""
    operator_retries: bool = False
    """After the calm, an operator tries each escalated incident once more."""
    operator_attests: bool = True
    """After the calm, an operator switches off what an incident waits for, and says so."""

    def __str__(self) -> str:
        lines = [f"schedule {self.seed}:{self.index}, noise {self.noise:.2f}"]
        lines += [f"  node {n.name} rack={n.rack} slots={n.slots}" for n in self.nodes]
        lines += [
            f"  job {j.id}: {j.node_count} nodes x {j.ranks_per_node} ranks, {j.total_steps} steps of "
            f"{j.step_time_s} s, saved every {j.save_every} in {j.save_time_s} s, evaluated in {j.evaluates_s} s, "
            f"setup {j.setup_s} s, at least {j.min_nodes} nodes, lease {j.keeps_lease}, "
            f"submitted at {j.submitted_at:.1f} s"
            for j in self.jobs
        ]
        lines += [f"  {event}" for event in self.events]
        if self.operator_retries:
            lines.append("  after the calm: escalated incidents are retried once")
        return "\n".join(lines)


_STATES = ("detected", "stopping", "placing", "launching", "verifying", "recovered", "waiting_for_fence")
_SIGNALS = (9, 9, 9, 11, 6, 15)
_CODES = (1, 7, 0)


@dataclass
class _Draft:
    rng: random.Random
    jobs: tuple[JobShape, ...]
    nodes: tuple[NodeShape, ...]
    events: list[Event] = field(default_factory=list)

    def add(self, kind: str) -> None:
        rng = self.rng
        job = rng.choice(self.jobs)
        # Without a name it is a node of the job's newest generation, whichever that is by then.
        node = rng.choice(self.nodes).name if rng.random() < 0.5 else ""
        at = rng.uniform(3.0, 50.0)
        world_size = job.node_count * job.ranks_per_node
        rank = rng.randrange(world_size)
        when = rng.choice(("", "", "about to be ")) + rng.choice(_STATES) if rng.random() < 0.5 else ""
        match kind:
            case "kill_rank":
                self._put(kind, at=at, job=job.id, rank=rank, value=rng.choice(_SIGNALS), when=when)
            case "exit_rank":
                self._put(kind, at=at, job=job.id, rank=rank, value=rng.choice(_CODES), when=when)
            case "kill_two_ranks":
                for _ in range(2):
                    self._put("kill_rank", at=at, job=job.id, rank=rng.randrange(world_size), value=9, when=when)
            case "kill_twice":
                self._put("kill_rank", at=at, job=job.id, rank=rank, value=9)
                self._put(
                    "kill_rank", at=at, job=job.id, rank=rng.randrange(world_size), value=9, when=when or "launching"
                )
            case "kill_in_between":
                # The second death is stored after a worker has looked and before it saves what it decided.
                state = rng.choice(("placing", "launching", "verifying", "recovered", "recovered"))
                self._put("kill_rank", at=at, job=job.id, rank=rank, value=9)
                self._put("kill_rank", at=at, job=job.id, rank=rank, value=9, when=f"about to be {state}")
            case "blind_launch":
                # Nobody hears what the ranks do, so that their launch is given up though they train.
                self._put("lose_contact", at=0.0, job=job.id, node=node, seconds=40.0, when="launching")
            case "break_and_kill":
                part = rng.choice(("optimizer", "model"))
                self._put("break_continuity", at=at, job=job.id, text=part, value=1)
                self._put("kill_rank", at=at, job=job.id, rank=rank, value=9)
                self._put(
                    "kill_rank", at=at, job=job.id, rank=rank, value=9, when=rng.choice(("launching", "verifying"))
                )
            case "restore_backup":
                self._put(kind, at=rng.uniform(12.0, 60.0), seconds=rng.choice((2.0, 6.0, 12.0, 25.0)))
            case "lose_contact" | "restart_agent" | "reboot" | "stuck_stop" | "unhealthy" | "cordon" | "slow_prepare":
                seconds = rng.choice((0.5, 2.0, 6.0, 14.0, 40.0))
                self._put(kind, at=at, job=job.id, node=node, seconds=seconds, when=when)
            case "prepare_fails" | "refuse_policy" | "busy_port" | "silent_runner" | "runner_dies":
                self._put(kind, at=at, job=job.id, node=node, value=rng.choice((1, 1, 2, 4)), when=when)
            case "worker_dies_before_save" | "worker_dies_after_save":
                self._put(kind, at=at, job=job.id, value=rng.choice((1, 1, 2, 6)), when=when)
            case "repeat_advance":
                self._put(kind, at=at, job=job.id, value=rng.randrange(2, 5), when=when)
            case "command":
                command = rng.choice(("pause", "pause", "resume", "retry", "close"))
                self._put(kind, at=at, job=job.id, text=command, when=when)
                if command == "pause":
                    later = at + rng.uniform(0.5, 20.0)
                    self._put(kind, at=later, job=job.id, text=rng.choice(("resume", "resume", "retry")), when="paused")
            case "stop_job":
                self._put(kind, at=at, job=job.id, when=when)
            case "crash_at_step":
                step = rng.randrange(1, job.total_steps + 1)
                self._put(kind, at=0.0, job=job.id, rank=rank, value=step, seconds=rng.choice((1, 2, 99)))
            case "break_continuity":
                part = rng.choice(("optimizer", "scheduler", "sampler", "loss", "resumed_step"))
                self._put(kind, at=at, job=job.id, text=part, value=rng.choice((1, 1, 2)))
                self._put("kill_rank", at=at, job=job.id, rank=rank, value=9)
            case "exit_last":
                self._put(kind, at=0.0, job=job.id, rank=rank, value=rng.choice((0, 1, 9)))
            case "freeze" | "isolate" | "kill_agent" | "power_off" | "half_open":
                seconds = rng.choice((2.0, 8.0, 11.0, 14.0, 20.0, 35.0, 60.0, 200.0))
                self._put(kind, at=at, job=job.id, node=node, seconds=seconds, when=when)
            case "cut_while_training":
                # The agent alone is cut, for longer than a node may be silent: the job must not notice.
                self._put("lose_contact", at=at, job=job.id, node=node, seconds=rng.choice((12.0, 25.0, 60.0)))
            case "isolate_and_kill":
                # The peers fail at once, so that the lease of the node that is cut off counts from its last contact.
                self._put("isolate", at=at, job=job.id, node=node, seconds=rng.choice((30.0, 60.0, 200.0)))
                self._put("kill_rank", at=at + rng.uniform(-1.0, 3.0), job=job.id, rank=rank, value=9)
            case "cut_and_kill":
                # Ranks train on without their agent, until a peer dies: their lease counts from their last step.
                self._put("lose_contact", at=at, job=job.id, node=node, seconds=90.0)
                self._put("kill_rank", at=at + rng.uniform(2.0, 30.0), job=job.id, rank=rank, value=9)
            case "stuck_and_cut":
                # The peer of a dead rank is told to stop and cannot; then it is cut off: its last contact comes last.
                self._put(kind, at=at, job=job.id, seconds=rng.uniform(4.0, 9.0))
            case "cut_while_launching":
                self._put("lose_contact", at=0.0, job=job.id, seconds=20.0, when="launching")
            case "cut_and_stop":
                # A job whose nodes cannot be seen is wanted gone: nothing says that it is.
                self._put("lose_contact", at=at, job=job.id, node=node, seconds=90.0)
                self._put("stop_job", at=at + rng.uniform(0.0, 15.0), job=job.id)
            case "freeze_twice":
                # What thaws is frozen again, and its agent is cut meanwhile.
                self._put("freeze", at=at, job=job.id, node=node, seconds=rng.uniform(4.0, 14.0))
                self._put("freeze", at=at + 15.0, job=job.id, node=node, seconds=rng.uniform(4.0, 40.0))
                self._put("lose_contact", at=at + 1.0, job=job.id, node=node, seconds=60.0)
            case "lose_two":
                for _ in range(2):
                    other = rng.choice(self.nodes).name
                    kind = rng.choice(("freeze", "isolate", "kill_agent", "power_off", "lose_contact"))
                    self._put(kind, at=at + rng.uniform(0.0, 6.0), job=job.id, node=other, seconds=60.0)
            case "cut_many":
                share = rng.choice((1.0, 1.0, 0.5))
                for other in self.nodes:
                    if rng.random() < share:
                        seconds = rng.uniform(11.0, 40.0)
                        self._put("lose_contact", at=at + rng.uniform(0.0, 3.0), node=other.name, seconds=seconds)
            case "web_restarts" | "web_stalls" | "database_away":
                seconds = rng.choice((0.5, 2.0, 4.0, 8.0, 20.0, 45.0))
                self._put(kind, at=at, job=job.id, seconds=seconds, when=when)
            case "rearm":
                self._put(kind, at=rng.uniform(20.0, 100.0))
            case "attest" | "attest_falsely" | "provider":
                self._put(kind, at=at, job=job.id, node=node, when=rng.choice(("waiting_for_fence", "stopping")))
            case "mismatch":
                self._put(kind, at=at, job=job.id, node=node, when=when)

    def lose_losses(self, rng: random.Random) -> None:
        """In one schedule of six, a job's loss is lost: in one generation, in two, or whenever it gets there."""
        if rng.random() < 1 / 6:
            job = rng.choice(self.jobs)
            step = rng.randrange(1, job.total_steps + 1)
            self._put("lose_loss", at=0.0, job=job.id, value=step, seconds=rng.choice((1, 1, 2, 99)))

    def _put(self, kind: str, **fields: object) -> None:
        self.events.append(Event(kind=kind, **fields))  # type: ignore[arg-type]


_KINDS = {
    "kill_rank": 14, "exit_rank": 6, "kill_two_ranks": 4, "kill_twice": 8, "kill_in_between": 5, "blind_launch": 2,
    "break_and_kill": 2, "lose_contact": 6, "restart_agent": 3, "reboot": 3, "stuck_stop": 2, "unhealthy": 4,
    "cordon": 2, "slow_prepare": 2, "prepare_fails": 4, "refuse_policy": 1, "busy_port": 4, "silent_runner": 2,
    "runner_dies": 3, "worker_dies_before_save": 4, "worker_dies_after_save": 4, "repeat_advance": 4, "command": 8,
    "stop_job": 3, "crash_at_step": 3, "break_continuity": 4, "exit_last": 2, "mismatch": 1, "freeze": 8,
    "isolate": 6, "kill_agent": 5, "power_off": 5, "half_open": 2, "cut_while_training": 8, "isolate_and_kill": 8,
    "cut_and_kill": 8, "stuck_and_cut": 8, "cut_while_launching": 6, "cut_and_stop": 3, "freeze_twice": 4,
    "lose_two": 4, "cut_many": 3, "web_restarts": 3, "web_stalls": 3, "database_away": 3, "rearm": 3, "attest": 3,
    "attest_falsely": 2, "provider": 3, "restore_backup": 2,
}  # fmt: skip


def make_schedule(seed: int, index: int) -> Schedule:
    """The schedule of that number; the same arguments give the same schedule on every machine."""
    rng = random.Random(f"{seed}:{index}:schedule")
    jobs = tuple(
        JobShape(
            id=f"job-{name}",
            node_count=rng.choice((1, 2, 2, 2, 3) if name == "a" else (1, 1, 2)),
            ranks_per_node=rng.choice((1, 1, 2)),
            total_steps=rng.choice((16, 32, 48)),
            save_every=rng.choice((4, 8)),
            step_time_s=rng.choice((0.6, 1.0, 1.6)),
            submitted_at=rng.uniform(0.0, 5.0),
            reports_digests=rng.random() < 0.9,
            saves_step_0=rng.random() < 0.8,
            setup_s=rng.choice((1.0, 1.0, 14.0)),
            save_time_s=rng.choice((0.0, 0.5, 2.0)),
            evaluates_s=rng.choice((0.0, 0.0, 0.0, 3.0, 9.0)),
            keeps_lease=rng.random() < 0.9,
        )
        for name in ("a", "b")
    )
    jobs = tuple(
        replace(job, min_nodes=rng.randrange(1, job.node_count + 1)) if rng.random() < 0.3 else job for job in jobs
    )
    needed = sum(job.node_count for job in jobs)
    spares = rng.choice((0, 1, 1, 1, 2))
    nodes = tuple(
        NodeShape(name=f"gpu-{number:02d}", rack=f"r{number % 2}", slots=2) for number in range(1, needed + spares + 1)
    )
    draft = _Draft(rng=rng, jobs=jobs, nodes=nodes)
    for kind in rng.choices(list(_KINDS), weights=list(_KINDS.values()), k=rng.randrange(0, 13)):
        draft.add(kind)
    draft.lose_losses(random.Random(f"{seed}:{index}:losses"))
    return Schedule(
        seed=seed,
        index=index,
        nodes=nodes,
        jobs=jobs,
        events=tuple(sorted(draft.events, key=lambda event: event.at)),
        noise=rng.choice((0.0, 0.2, 0.5, 1.0)),
        operator_retries=rng.random() < 0.5,
        operator_attests=rng.random() < 0.8,
    )
