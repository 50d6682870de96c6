"""Many agents in one process, over real websockets and the real protocol, with scripted ranks instead of processes.

They do what an agent does: dial out and come back, prepare, run and stop what they are ordered, refuse what is old,
keep their outbox over broken connections. Their ranks step together or not at all, like those of a synchronous job.
Everything that they did and heard is kept, so that a test can ask for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from agents.link import reconnect_delay
from agents.protocol.messages import (
    Assignment,
    AssignmentPhase,
    AssignmentReport,
    CheckpointSaved,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HighestGeneration,
    LaunchSpec,
    Message,
    NodeFacts,
    Order,
    ProofKind,
    RankExited,
    RankResumed,
    RankStarted,
    SeenPhase,
    StepReport,
    StepReports,
    StopProof,
    Welcome,
)
from agents.protocol.outbox import Outbox
from agents.protocol.session import AgentSession
from agents.protocol.version import PROTOCOL_VERSION

TICK_S = 1.0
STEPS_PER_TICK = 4
SAVE_EVERY = 8
"""Steps; the first save is after the first tick, so that there is something to go on from."""
DIGEST = {"model": "m", "optimizer": "o", "scheduler": "s", "sampler": "p", "rng": "r"}
OPEN_LIMIT_S = 10.0
SILENCE_LIMIT_S = 10.0
RECONNECT_BASE_S, RECONNECT_CAP_S = 0.5, 30.0
"""As `agents.link` and `agents.settings` have them."""

Key = tuple[str, int]
"""A job and a generation."""


@dataclass
class Share:
    """One generation on one node: as an agent's disk and its runner know it."""

    plan_id: str
    launch: LaunchSpec | None
    phase: SeenPhase
    living: set[int] = field(default_factory=set)
    """Ranks that run."""
    step: int = 0
    steps: int = 0
    """Step reports made in this generation, for all of its ranks."""
    ran: bool = False
    started_at: float | None = None
    """Monotonic, like `stopped_at`: when its first rank ran, and when its last one was gone."""
    stopped_at: float | None = None


class ScriptedAgent:
    """One node's agent; lives in the loop of its fleet."""

    def __init__(self, fleet: ScriptedFleet, name: str, credential: str) -> None:
        self.name = name
        self.boot_id = f"boot-{name}"
        self.shares: dict[Key, Share] = {}
        self.connections = 0
        """How often the server has said welcome."""
        self.orders: list[tuple[float, Order]] = []
        """(monotonic, order) as they came."""
        self.grants: list[tuple[float, bool]] = []
        """(monotonic, whether it grants a lease) of each reply to a heartbeat."""
        self.goodbyes: list[int] = []
        self.gaps = 0
        self.slow_to_stop = threading.Event()
        """While set, nothing is stopped: the proof stays out."""
        self.outbox = Outbox(outbox_id=f"box-{name}")
        self._fleet = fleet
        self._credential = credential
        self._highest: dict[str, tuple[int, str]] = {}
        self._cut = False
        self._revision = 0
        self._session: AgentSession | None = None
        self._wake = asyncio.Event()
        self._heard_at = 0.0

    @property
    def connected(self) -> bool:
        return self._session is not None and self._session.established

    def cut(self) -> None:
        """Fall silent in both directions; the sockets stay as they are."""
        self._cut = True

    def mend(self) -> None:
        self._cut = False

    def kill_rank(self, key: Key, rank: int) -> None:
        """A rank dies by SIGKILL; nobody wanted it."""
        self.shares[key].living.discard(rank)
        job, generation = key
        self._tell(
            RankExited(
                job=job, generation=generation, rank=rank, pid=1000 + rank, at=time.time(), exit_code=None, signal=9
            )
        )

    # --- The connection -------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Connect and reconnect until cancelled."""
        attempt = 0
        while True:
            began = time.monotonic()
            with contextlib.suppress(OSError, TimeoutError, WebSocketException):
                async with connect(
                    self._fleet.url,
                    additional_headers={"Authorization": f"Bearer {self._credential}"},
                    compression=None,
                    proxy=None,
                    open_timeout=OPEN_LIMIT_S,
                    close_timeout=0.5,
                    ping_interval=None,
                ) as websocket:
                    await self._converse(websocket)
            self._session = None
            attempt = 0 if time.monotonic() - began > 10.0 else attempt + 1
            delay_s = reconnect_delay(attempt, base_s=RECONNECT_BASE_S, cap_s=RECONNECT_CAP_S, draw=random.uniform)
            await asyncio.sleep(delay_s)

    async def _converse(self, websocket: ClientConnection) -> None:
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            agent_version="0.1.0",
            node=self.name,
            boot_id=self.boot_id,
            outbox_id=self.outbox.outbox_id,
            facts=NodeFacts(hostname=self.name, gpu_count=1, gpu_model="Scripted GPU", simulated_gpus=True, slots=1),
            highest=[
                HighestGeneration(job=job, generation=number, plan_id=plan)
                for job, (number, plan) in self._highest.items()
            ],
        )
        self._session = session = AgentSession(hello, self.outbox)
        self._heard_at = time.monotonic()
        await websocket.send(session.opening())
        tasks = [
            asyncio.create_task(work)
            for work in (
                self._receive(websocket, session),
                self._send(websocket, session),
                self._beat(websocket, session),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, websocket: ClientConnection, session: AgentSession) -> None:
        async for frame in websocket:
            while self._cut:
                await asyncio.sleep(0.05)
            self._heard_at = time.monotonic()
            assert isinstance(frame, bytes)
            match session.receive(frame):
                case Welcome():
                    self.connections += 1
                    for key, share in self.shares.items():
                        self._report(key, share)
                case HeartbeatReply(grants_lease=grants):
                    self.grants.append((time.monotonic(), grants))
                case Order() as order:
                    self.orders.append((time.monotonic(), order))
                    self._revision = order.revision
                    for assignment in order.assignments:
                        self._obey(assignment)
                case Goodbye(code=code):
                    self.goodbyes.append(code)
            self._wake.set()

    async def _send(self, websocket: ClientConnection, session: AgentSession) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while not self._cut and (frames := session.frames_to_send()):
                for frame in frames:
                    await websocket.send(frame)

    async def _beat(self, websocket: ClientConnection, session: AgentSession) -> None:
        while True:
            if not self._cut:
                if time.monotonic() - self._heard_at > SILENCE_LIMIT_S:
                    raise TimeoutError
                if session.established:
                    await websocket.send(session.transient(Heartbeat(at=time.time(), revision=self._revision)))
            await asyncio.sleep(1.0)

    def _tell(self, message: Message) -> None:
        self.outbox.add(message)
        self._wake.set()

    # --- What it is ordered ---------------------------------------------------------------------------------------

    def _obey(self, order: Assignment) -> None:
        key = (order.job, order.generation)
        share = self.shares.get(key)
        if order.phase is AssignmentPhase.STOP:
            self._stop(key, share or self.shares.setdefault(key, Share(order.plan_id, None, SeenPhase.STOPPED)))
            return
        if (order.generation, order.plan_id) < self._highest.get(order.job, (0, "")) and share is None:
            refused = Share(order.plan_id, order.launch, SeenPhase.REFUSED)
            self._report(key, refused)
            return
        if share is None:
            self._highest[order.job] = (order.generation, order.plan_id)
            share = self.shares[key] = Share(order.plan_id, order.launch, SeenPhase.PREPARED)
            self._report(key, share)
        if order.phase is AssignmentPhase.RUN and share.phase is SeenPhase.PREPARED:
            self._run(key, share, order.launch)

    def _run(self, key: Key, share: Share, launch: LaunchSpec | None) -> None:
        assert launch is not None
        job, generation = key
        share.launch, share.phase, share.ran = launch, SeenPhase.RUNNING, True
        share.started_at, share.step = time.monotonic(), launch.parent_step or 0
        share.living = set(range(launch.first_rank, launch.first_rank + launch.ranks_per_node))
        self._report(key, share)
        for rank in sorted(share.living):
            self._tell(RankStarted(job=job, generation=generation, rank=rank, pid=1000 + rank, at=time.time()))
            self._tell(
                RankResumed(
                    job=job,
                    generation=generation,
                    rank=rank,
                    step=share.step,
                    at=time.time(),
                    parent_generation=launch.parent_generation,
                    saved_digest=DIGEST if share.step else {},
                    live_digest=DIGEST,
                    deterministic=True,
                )
            )

    def _stop(self, key: Key, share: Share) -> None:
        if self.slow_to_stop.is_set():
            asyncio.get_running_loop().call_later(0.1, self._stop, key, share)
            return
        if share.living:
            share.living.clear()
        if share.ran and share.stopped_at is None:
            share.stopped_at = time.monotonic()
        share.phase = SeenPhase.STOPPED
        self._report(key, share)

    def _report(self, key: Key, share: Share) -> None:
        job, generation = key
        proof = None
        if share.phase is SeenPhase.STOPPED:
            kind = ProofKind.CGROUP_EMPTY if share.ran else ProofKind.NEVER_STARTED
            proof = StopProof(kind=kind, at=time.time(), evidence="a scripted control group is empty")
        first = share.launch is not None and share.launch.node_rank == 0
        self._tell(
            AssignmentReport(
                job=job,
                generation=generation,
                plan_id=share.plan_id,
                phase=share.phase,
                at=time.time(),
                reason="older_generation" if share.phase is SeenPhase.REFUSED else "",
                master_port=20001 if first and share.phase is not SeenPhase.STOPPED else None,
                fingerprint="scripted",
                proof=proof,
                boot_id=self.boot_id,
                keeps_lease=True,
                launch=share.launch if share.phase is SeenPhase.RUNNING else None,
            )
        )

    def step(self, key: Key) -> None:
        """Every rank here makes its steps of one tick; rank 0 saves now and then."""
        share, (job, generation) = self.shares[key], key
        first = share.step + 1
        share.step += STEPS_PER_TICK
        reports = [
            StepReport(
                rank=rank,
                step=step,
                at=time.time(),
                loss=5.0 / step,
                learning_rate=1e-3,
                grad_norm=1.0,
                span_start=8 * (step - 1),
                span_stop=8 * step,
                step_time_s=TICK_S / STEPS_PER_TICK,
            )
            for step in range(first, share.step + 1)
            for rank in sorted(share.living)
        ]
        share.steps += len(reports)
        self._tell(StepReports(job=job, generation=generation, steps=reports))
        if 0 in share.living and share.step % SAVE_EVERY == STEPS_PER_TICK and share.launch is not None:
            self._tell(
                CheckpointSaved(
                    job=job,
                    generation=generation,
                    step=share.step,
                    at=time.time(),
                    directory=f"/checkpoints/{generation}/{share.step}",
                    size_bytes=1000,
                    world_size=share.launch.world_size,
                    parent_generation=share.launch.parent_generation,
                    parent_step=share.launch.parent_step,
                )
            )


class ScriptedFleet:
    """All agents of a test, in a thread with a loop of its own. A context manager: leaving it ends them."""

    def __init__(self, url: str, credentials: dict[str, str]) -> None:
        """`url`: the agents' websocket route; `credentials`: node name -> secret."""
        self.url = url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="scripted-agents", daemon=True)
        self._tasks: list[asyncio.Task[None]] = []
        self.training = True
        """While False, every rank rests between two steps."""
        self.agents = {name: ScriptedAgent(self, name, secret) for name, secret in credentials.items()}

    def __enter__(self) -> ScriptedFleet:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def call(self, work: Callable[[], object]) -> None:
        """Do something in the agents' thread, and wait for it."""

        async def done() -> None:
            work()

        asyncio.run_coroutine_threadsafe(done(), self._loop).result(10)

    def holders(self, job: str) -> list[tuple[ScriptedAgent, Key, Share]]:
        """Who runs a job now, in rank order."""
        found = [
            (agent, key, share)
            for agent in list(self.agents.values())
            for key, share in list(agent.shares.items())
            if key[0] == job and share.phase is SeenPhase.RUNNING and share.launch is not None
        ]
        return sorted(found, key=lambda held: held[2].launch.node_rank if held[2].launch else 0)

    def kill_rank(self, job: str, rank: int = 1) -> None:
        """One rank of the running generation dies."""
        for agent, key, share in self.holders(job):
            if rank in share.living:
                self.call(lambda agent=agent, key=key: agent.kill_rank(key, rank))
                return
        raise AssertionError(f"rank {rank} of {job} does not run")

    def overlaps(self) -> list[str]:
        """Pairs of generations of one job that ran at once, anywhere. There must be none, ever."""
        now = time.monotonic()
        spans: dict[str, dict[int, list[tuple[float, float]]]] = {}
        for agent in list(self.agents.values()):
            for (job, number), share in list(agent.shares.items()):
                if share.started_at is not None:
                    spans.setdefault(job, {}).setdefault(number, []).append((share.started_at, share.stopped_at or now))
        found = []
        for job, numbers in spans.items():
            for older in sorted(numbers):
                ended = max(end for _, end in numbers[older])
                found += [
                    f"{job}: generation {newer} began before generation {older} was gone"
                    for newer in numbers
                    if newer > older and min(start for start, _ in numbers[newer]) < ended
                ]
        return found

    def steps(self) -> dict[Key, int]:
        """Step reports made, by generation."""
        made: dict[Key, int] = {}
        for agent in list(self.agents.values()):
            for key, share in list(agent.shares.items()):
                if share.ran:
                    made[key] = made.get(key, 0) + share.steps
        return made

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._tasks = [self._loop.create_task(agent.live()) for agent in self.agents.values()]
        self._tasks.append(self._loop.create_task(self._train()))
        self._loop.run_forever()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _train(self) -> None:
        """A generation steps when every rank of it runs: none goes on alone."""
        while True:
            await asyncio.sleep(TICK_S)
            if not self.training:
                continue
            running: dict[Key, list[tuple[ScriptedAgent, Share]]] = {}
            for agent in self.agents.values():
                for key, share in agent.shares.items():
                    if share.phase is SeenPhase.RUNNING:
                        running.setdefault(key, []).append((agent, share))
            for key, held in running.items():
                world = held[0][1].launch.world_size if held[0][1].launch else 0
                if sum(len(share.living) for _, share in held) == world:
                    for agent, _ in held:
                        agent.step(key)
