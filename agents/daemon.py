"""The node agent as a whole: joins, senses, acts and reports, until it is told to end. `python -m agents` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import random
import signal
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from agents.boot_clock import this_boot
from agents.errors import AgentError, ServerUnreachable, StateUnusable
from agents.faults.faults import Faults
from agents.faults.tombstone import wait_while_down
from agents.join import Credential, join, stored_credential
from agents.link import Handlers, Link, reconnect_delay
from agents.log_lines import NodeLog
from agents.outbox import DiskOutbox
from agents.policy import Policy, load_policy
from agents.probes import Probes
from agents.protocol.errors import CloseCode
from agents.protocol.messages import GpuSamples, Hello, Message, Order
from agents.protocol.version import PROTOCOL_VERSION
from agents.sensors.base import GpuSensor
from agents.sensors.host import node_facts, slots
from agents.sensors.nvml_probe import NvmlProbe
from agents.sensors.rank_socket import RankSocket, socket_path
from agents.sensors.simulated import SimulatedGpus
from agents.server_clock import ServerClock
from agents.settings import RUNNER_COMMAND, Settings
from agents.supervisor.cgroups import NodeGroups
from agents.supervisor.highest import HighestStore
from agents.supervisor.memory_places import MemoryPlaces
from agents.supervisor.ports import PortReservations
from agents.supervisor.records import RunRecords
from agents.supervisor.run import Workplace
from agents.supervisor.starter import PR_SET_CHILD_SUBREAPER
from agents.supervisor.supervisor import Supervisor

log = NodeLog(__name__)

_STOP_LIMIT_S = 10.0


class Daemon:
    """One node's agent."""

    def __init__(self, settings: Settings, *, policy: Policy) -> None:
        self._settings = settings
        self._boot_id = this_boot()
        self._outbox = DiskOutbox(settings.state_directory)
        self._clock = ServerClock()
        self._children: set[int] = set()
        self._highest = HighestStore(settings.state_directory)
        self._records = RunRecords(settings.state_directory)
        self._ranks = RankSocket(
            socket_path(settings.state_directory), take=lambda said, user: self.supervisor.take(said, user)
        )
        self._groups = NodeGroups.find(settings.name, settings.state_directory) if settings.cgroups else None
        place = Workplace(
            node=settings.name,
            boot_id=self._boot_id,
            runner_command=settings.runner_command,
            checks_runner=settings.runner_command == RUNNER_COMMAND,
            policy=policy,
            records=self._records,
            ports=PortReservations(*settings.port_range),
            groups=self._groups,
            memory=MemoryPlaces(settings.state_directory),
            socket=self._ranks.path,
            environment=os.environ,
            driver=lambda: self._sensor.facts.driver,
            emit=self._emit,
            tell_gap=self._tell_gap,
            drain=self._ranks.drain,
            children=self._children,
            changed=self._run_changed,
            progressed=lambda job, generation, rank: self.faults.look(),
            told=lambda job, generation: self._outbox.told.of(job, generation),
            contact_ns=lambda: self._link.contact_ns,
        )
        self.supervisor = Supervisor(highest=self._highest, place=place, slots=1)
        self._probes = Probes(emit=self._emit, server_now=self._clock.now, told=lambda: self._outbox.told.probes)
        self._sensor = self._choose_sensor()
        self._credential: Credential | None = None
        self._reconciling = False
        self._link = Link(
            settings=settings,
            outbox=self._outbox,
            clock=self._clock,
            handlers=Handlers(
                hello=self._hello,
                credential=self._secret,
                welcomed=self._welcomed,
                ordered=self._ordered,
                refused=self._refused,
                granted=self.supervisor.note_contact,
            ),
        )
        self.faults = Faults(
            state_directory=settings.state_directory,
            supervisor=self.supervisor,
            link=self._link,
            emit=self._emit,
            server_now=self._clock.now,
            settings=settings,
            children=self._children,
        )

    def _choose_sensor(self) -> GpuSensor:
        if self._settings.simulated_gpus:
            return SimulatedGpus(
                node=self._settings.name, count=self._settings.simulated_gpus, busy=lambda: self.supervisor.busy
            )
        return NvmlProbe(children=self._children)

    # --- Life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled. Raises `AgentError` for what an operator has to put right first."""
        self._begin()
        try:
            facts = await self._sensor.start()
            self.supervisor.slots = slots(self._settings, facts)
            self.supervisor.adopt()
            self.faults.adopt()
            await self._obtain_credential()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._link.run())
                tasks.create_task(self._sample())
        finally:
            await asyncio.shield(self._end())

    def _begin(self) -> None:
        if self._groups is None:
            log.warning("cgroup v2 is not writable: runs are found by their mark in /proc", node=self._settings.name)
            # Orphans of a dead runner come to the agent then, and not to init, where nobody would find them.
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        else:
            self._groups.hold()
            self._groups.remove_left_over(now=time.time())
        self._highest.load()
        self._records.prepare()
        self._outbox.open()
        self._ranks.open()

    async def _end(self) -> None:
        if self._settings.stop_runs_on_exit:
            await self.supervisor.stop_all(within_s=_STOP_LIMIT_S)
        await self.faults.close()
        await self.supervisor.close()
        await self._probes.close()
        self._ranks.close()
        self._outbox.close()
        await self._sensor.close()
        if self._groups is not None:
            self._groups.leave()

    async def _obtain_credential(self) -> None:
        attempt = 0
        while self._credential is None:
            try:
                self._credential = stored_credential(self._settings) or await asyncio.to_thread(join, self._settings)
            except ServerUnreachable as err:
                delay_s = reconnect_delay(
                    attempt,
                    base_s=self._settings.reconnect_base_s,
                    cap_s=self._settings.reconnect_cap_s,
                    draw=random.uniform,
                )
                attempt += 1
                log.warning("joining has to wait", error=err, in_s=round(delay_s, 2))
                await asyncio.sleep(delay_s)

    async def _sample(self) -> None:
        interval_s = self._settings.sample_interval_s
        while True:
            began = time.monotonic()
            try:
                samples = await self._sensor.sample()
            except Exception:  # a broken sensor must not take the ranks' supervisor with it
                log.exception("GPUs could not be sampled")
                samples = []
            if samples:
                self._link.send_transient(GpuSamples(samples=samples))
            self.faults.look()
            self._outbox.look()
            await asyncio.sleep(max(0.0, interval_s - (time.monotonic() - began)))

    # --- What the link asks for -----------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        facts = self._sensor.facts
        self.supervisor.slots = slots(self._settings, facts)
        return Hello(
            protocol=PROTOCOL_VERSION,
            agent_version=metadata.version("everstep"),
            node=self._settings.name,
            boot_id=self._boot_id,
            outbox_id=self._outbox.outbox_id,
            facts=node_facts(self._settings, facts),
            highest=self._highest.for_hello(),
        )

    def _secret(self) -> str:
        assert self._credential is not None
        return self._credential.secret

    def _welcomed(self) -> None:
        for report in self.supervisor.reports():
            self._outbox.add(report)

    def _ordered(self, order: Order) -> None:
        try:
            self.supervisor.apply(order.assignments)
            self.faults.take(order.faults)
        except StateUnusable as err:
            # Not recorded, so not followed: the server goes on asking, as the revision does not rise.
            log.error("an order could not be taken over", revision=order.revision, error=err)
            return
        self._probes.take(order.probes)
        if order.memory_of is not None:
            self.supervisor.clean_memory(order.memory_of)
        self._link.revision = order.revision

    async def _refused(self, code: CloseCode) -> bool:
        """Join anew if there is a token for it; True if that worked. A revoked node never comes back by itself."""
        if code is CloseCode.UNAUTHORIZED and self._settings.join_token is not None:
            try:
                self._credential = await asyncio.to_thread(join, self._settings)
                log.info("joined anew: the server did not know this node's credential", node=self._settings.name)
                return True
            except AgentError as err:
                log.warning("joining anew failed", error=err)
        log.error(
            "the server refuses this agent; an operator has to act (see the reason above), trying again slowly",
            code=code.name,
            node=self._settings.name,
        )
        return False

    # --- What happens on the node ---------------------------------------------------------------------------------

    def _emit(self, message: Message) -> None:
        self._outbox.add(message)
        self._link.wake()

    def _tell_gap(self, reason: str) -> None:
        log.error("something is lost and told as a gap", reason=reason)
        self._outbox.tell_gap(reason)
        self._link.wake()

    def _run_changed(self) -> None:
        if not self._reconciling:
            self._reconciling = True
            asyncio.get_running_loop().call_soon(self._reconcile)

    def _reconcile(self) -> None:
        self._reconciling = False
        try:
            self.supervisor.reconcile()
        except StateUnusable as err:
            log.error("an order waits: it could not be recorded", error=err)


async def serve(settings: Settings) -> None:
    """Run the agent until SIGTERM or SIGINT. Raises `AgentError`."""
    wait_while_down(settings.state_directory)
    policy = load_policy(settings.policy_file)
    with _state_directory(settings.state_directory):
        daemon = Daemon(settings, policy=policy)
        work = asyncio.ensure_future(daemon.run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, work.cancel)
        log.info("agent started", node=settings.name, server=settings.server, state=settings.state_directory)
        with contextlib.suppress(asyncio.CancelledError):
            await work
        log.info("agent ended", node=settings.name)


@contextlib.contextmanager
def _state_directory(directory: Path) -> Iterator[None]:
    """Make the state directory and hold it: two agents with one memory would both be wrong."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o711)  # ranks of other accounts pass through to their own run
        lock = os.open(directory / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise StateUnusable(f"State directory {directory} cannot be used ({err.strerror}).") from err
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(lock)
        raise StateUnusable(
            f"Another agent uses {directory}: stop it, or give this one a directory of its own."
        ) from err
    try:
        yield
    finally:
        os.close(lock)
