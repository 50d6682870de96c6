"""Every message of the wire, as tagged structs; agents and server share this module and nothing else.

Facts flow up (agent to server), wishes flow down. Wishes are desired state, never commands: an `Order` says all that a
node should run, so lost, repeated, late and reordered orders are harmless. Times called `at` are Unix seconds on the
sender's clock; durations carry `_s`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Text = Annotated[str, Meta(max_length=4000)]
Generation = Annotated[int, Meta(ge=1)]
Digest64 = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
"""64 bits as hexadecimal digits."""


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages. Unknown fields are ignored, so that a newer peer may say more."""


# --- Values inside messages ---------------------------------------------------------------------------------------


class AssignmentPhase(StrEnum):
    """What the server wants of one generation on one node."""

    PREPARE = "prepare"
    RUN = "run"
    STOP = "stop"


class SeenPhase(StrEnum):
    """What one generation on one node really does, as its agent sees it."""

    PREPARING = "preparing"
    PREPARED = "prepared"
    PREPARE_FAILED = "prepare_failed"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    """Proven: no process of the generation is left on the node; `proof` says how that is known."""
    REFUSED = "refused"
    """The agent's own policy or its record of generations forbids it; `detail` says which."""


class ProofKind(StrEnum):
    """How it is known that no process of a generation can act on a node any more."""

    CGROUP_EMPTY = "cgroup_empty"
    PROC_SCAN_EMPTY = "proc_scan_empty"
    NEVER_STARTED = "never_started"
    UNKILLABLE = "unkillable"
    """What is left is dead or stuck in the kernel (state D or Z) with SIGKILL pending: it never returns to user mode.
    Good for other nodes only; this one is quarantined until it has rebooted."""
    BOOT_CHANGED = "boot_changed"
    """The node has booted since: nothing of before is left."""
    LEASE_EXPIRED = "lease_expired"
    """The server's word: the lease ran out, and a stopped peer means that no other rank can step."""
    PROVIDER = "provider"
    """A fence provider (power controller, cloud) says that the node is off."""
    ATTESTATION = "attestation"
    """An operator's word that the node is powered off."""


AGENT_PROOFS = frozenset(
    {
        ProofKind.CGROUP_EMPTY,
        ProofKind.PROC_SCAN_EMPTY,
        ProofKind.NEVER_STARTED,
        ProofKind.UNKILLABLE,
        ProofKind.BOOT_CHANGED,
    }
)
"""What an agent may say of its own node; the server finds the others itself."""


class Phase(StrEnum):
    """What a rank is doing; limits of silence depend on it."""

    SETUP = "setup"
    """From its start to its first finished step."""
    COMPILE = "compile"
    """Before the first finished step only."""
    STEP = "step"
    SAVE = "save"
    EVALUATION = "evaluation"


class StopProof(Message, frozen=True, kw_only=True):
    kind: ProofKind
    at: float
    evidence: Text
    """One sentence: which cgroup was empty, or which mark no process carried."""
    killed: int = 0
    """Processes that had to be killed."""


class NodeFacts(Message, frozen=True, kw_only=True):
    """What a node is. Sent with every hello."""

    hostname: str = ""
    address: str = "127.0.0.1"
    rack: str = ""
    cpu_count: int = 0
    memory_bytes: int = 0
    gpu_count: int = 0
    gpu_model: str = ""
    simulated_gpus: bool = False
    slots: int = 1
    """Ranks that the node takes at once: its GPUs, or what its configuration says."""
    probe_port: int = 22
    """TCP port that other agents knock at when this node is silent; an answer of any kind, also a refusal, is life."""


class HighestGeneration(Message, frozen=True, kw_only=True):
    """The newest plan that an agent has on disk for a job; it refuses what is older."""

    job: Name
    generation: Generation
    plan_id: Name


class GpuSample(Message, frozen=True, kw_only=True):
    """One GPU at one moment. A value that could not be read is None: unknown, never zero."""

    uuid: Name
    index: int
    at: float
    name: str = ""
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    clock_event_reasons: int | None = None
    problem: str = ""
    """Why values are missing, for example `probe hung`."""


class StateProbe(Message, frozen=True, kw_only=True):
    """A sample of each part of a rank's state (model, optimizer, ...) right after a step."""

    digests: dict[str, str] = {}
    unmoved: list[str] = []
    """Parts that are as they were before the step."""


class StepReport(Message, frozen=True, kw_only=True):
    """One finished optimizer step of one rank. The span is of global sample indices: [start, stop).

    None stands for what the script did not say or what could not be measured, never for zero.
    """

    rank: int
    step: int
    at: float
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    epoch: int = 0
    span_start: int | None = None
    span_stop: int | None = None
    step_time_s: float | None = None
    epoch_size: int | None = None
    """Where this epoch's last span stops."""
    indices_digest: Digest64 | None = None
    """Checksum of the dataset indices that travelled with this rank's batch; those of all ranks add up, modulo 2^64."""
    order_digest: Digest64 | None = None
    """The same, of the indices that the order has for this rank's part of the span."""
    samples: int | None = None
    """This rank's."""
    tokens: int | None = None
    """This rank's."""
    parameter_norm: float | None = None
    data_s: float | None = None
    """Part of the step that it waited for its batch."""
    forward_backward_s: float | None = None
    """What no other part of the step claims."""
    optimizer_s: float | None = None
    wait_s: float | None = None
    """Part of the step that the script says it waited for others."""
    checkpoint_s: float | None = None
    """How long training stood still for a save just before this step; no part of `step_time_s`."""
    memory_bytes: int | None = None
    """Resident memory of the rank; told about once a second."""
    gpu_memory_bytes: int | None = None
    """At most allocated by torch on the rank's GPU; told about once a second."""
    probe: StateProbe | None = None
    """Only with the first steps behind a save or a resume."""


class LeaseTerms(Message, frozen=True, kw_only=True):
    """How long a runner lets its ranks go on without contact to the server *and* without progress, by phase.

    Seconds on CLOCK_BOOTTIME. Within a generation terms only rise, so that the server never counts on less than the
    runner does. A rank that has finished fewer than three steps has the limit of its setup.
    """

    setup_s: float = 600.0
    compile_s: float = 1800.0
    step_s: float = 15.0
    save_s: float = 30.0
    evaluation_s: float = 30.0


class LaunchSpec(Message, frozen=True, kw_only=True):
    """All that a node needs to start its share of one generation; frozen with the plan."""

    argv: list[str]
    """The training script's command line; argv[0] is the interpreter. Never passed to a shell."""
    working_directory: str
    environment: dict[str, str]
    user: str = ""
    """Account to run the ranks as; empty means the agent's own."""
    run_id: Name
    """Fresh for each generation; names the rendezvous."""
    node_rank: int
    node_count: int
    ranks_per_node: int
    first_rank: int
    world_size: int
    master_address: str
    master_port: int | None = None
    """None while preparing on node rank 0: its agent reserves a port and reports it. Always set in phase `run`."""
    checkpoint_directory: str
    parent_generation: int | None = None
    """Checkpoint to resume from; None means start from the beginning."""
    parent_step: int | None = None
    parent_in_memory: bool = False
    """The checkpoint to resume from is in the nodes' memory and need not be on disk."""
    expected_fingerprint: str = ""
    stop_limit_s: float = 30.0


class Assignment(Message, frozen=True, kw_only=True):
    """One generation that a node should prepare, run or have stopped."""

    job: Name
    generation: Generation
    plan_id: Name
    phase: AssignmentPhase
    launch: LaunchSpec | None = None
    """None only with phase `stop`."""
    lease: LeaseTerms | None = None
    """Terms that hold now; the agent hands raised ones to the runner. None: the runner keeps no lease."""
    keep: list[Name] = []
    """Checkpoints that the ranks may not remove, as `<generation>:<step>`."""
    save_request: int = 0
    """Rises with each wish for a checkpoint now; the ranks save once for a number that they have not seen yet."""


class FaultKind(StrEnum):
    KILL_RANK = "kill-rank"
    KILL_AGENT = "kill-agent"
    """Kills agent, runner and ranks; the agent stays down for `duration_s`."""
    RESTART_AGENT = "restart-agent"
    """Kills the agent alone; it comes back at once."""
    FREEZE_NODE = "freeze-node"
    """SIGSTOP for agent, runner and ranks; SIGCONT after `duration_s`."""
    PARTITION = "partition"
    """Cuts the agent from the server for `duration_s`; ranks still meet."""
    ISOLATE_NODE = "isolate-node"
    """Cuts the agent from the server and its ranks from theirs for `duration_s`."""


class FaultOrder(Message, frozen=True, kw_only=True):
    """One drill's fault, applied at most once by the agent, never after `not_after`.

    How to undo it is on the agent's disk before it is applied, and a process outside the agent undoes it.
    """

    drill: Name
    kind: FaultKind
    job: Name
    generation: Generation
    rank: int
    not_after: float
    """Unix seconds on the server's clock; the agent stores it on disk before it applies the fault."""
    steps_after_save: int = 0
    """Wait until the rank is at least this many steps past its latest checkpoint."""
    duration_s: float = 0.0
    """After this long the fault is undone; 0 for faults that need no undoing."""


class ProbeOrder(Message, frozen=True, kw_only=True):
    """Ask this node's agent whether another node's kernel answers on the network."""

    probe: Name
    node: Name
    address: str
    port: int
    not_after: float
    """Unix seconds on the server's clock."""


# --- Agent to server ----------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    protocol: int
    agent_version: str
    node: Name
    boot_id: Name
    outbox_id: Name
    """Names the numbering of durable messages; a fresh id means that numbering starts at 1 again."""
    facts: NodeFacts
    highest: list[HighestGeneration] = []


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    at: float
    revision: int
    """Newest order that the agent has taken over; 0 if none."""


class GpuSamples(Message, frozen=True, kw_only=True, tag="gpu_samples"):
    samples: list[GpuSample]


class StepReports(Message, frozen=True, kw_only=True, tag="step_reports"):
    job: Name
    generation: Generation
    steps: list[StepReport]


class RankStarted(Message, frozen=True, kw_only=True, tag="rank_started"):
    job: Name
    generation: Generation
    rank: int
    pid: int
    at: float


class RankResumed(Message, frozen=True, kw_only=True, tag="rank_resumed"):
    """A rank is about to make its first step; digests were taken from its live objects."""

    job: Name
    generation: Generation
    rank: int
    step: int
    """Steps already done: 0 at the beginning, otherwise the parent's step."""
    total_steps: int | None = None
    at: float
    parent_generation: int | None = None
    saved_digest: dict[str, str] = {}
    """Per part (model, optimizer, scheduler, rng, sampler, ...), from the parent's manifest; empty if none."""
    live_digest: dict[str, str] = {}
    deterministic: bool = False
    """The script promises that equal state gives equal losses, bit for bit."""


class CheckpointSaved(Message, frozen=True, kw_only=True, tag="checkpoint_saved"):
    job: Name
    generation: Generation
    step: int
    at: float
    directory: str
    size_bytes: int
    world_size: int
    parent_generation: int | None = None
    parent_step: int | None = None
    save_time_s: float | None = None
    blocked_s: float | None = None
    """How long training stood still for it; None: for the whole save."""


class CheckpointRehashed(Message, frozen=True, kw_only=True, tag="checkpoint_rehashed"):
    """All files of a complete checkpoint were read again after its save, or some of them are not what was written."""

    job: Name
    generation: Generation
    rank: int
    step: int
    at: float
    ok: bool
    reason: Text = ""
    """What is wrong with which file."""


class SnapshotKept(Message, frozen=True, kw_only=True, tag="snapshot_kept"):
    """A rank's part of a snapshot is in this node's memory, where it outlives the rank."""

    job: Name
    generation: Generation
    rank: int
    step: int
    at: float
    world_size: int
    copy_of: int | None = None
    """A rank of another node, whose part is here as well; None: nodes hold no copies for each other."""


class SaveTroubleKind(StrEnum):
    FAILED = "failed"
    SKIPPED = "skipped"
    """Left out, since the one before it was still being written."""


class SaveInTrouble(Message, frozen=True, kw_only=True, tag="save_trouble"):
    """A save that came to nothing. Training goes on, and the last good checkpoint stays what it is."""

    job: Name
    generation: Generation
    rank: int
    step: int
    at: float
    kind: SaveTroubleKind
    attempt: int = 1
    """Which try of this step's save it was."""
    reason: Text = ""


class RankPhase(Message, frozen=True, kw_only=True, tag="rank_phase"):
    """A rank has begun to do something else."""

    job: Name
    generation: Generation
    rank: int
    phase: Phase
    at: float


class RankFinished(Message, frozen=True, kw_only=True, tag="rank_finished"):
    """The training loop of a rank says that it has done its last step."""

    job: Name
    generation: Generation
    rank: int
    step: int
    at: float


class RankExited(Message, frozen=True, kw_only=True, tag="rank_exited"):
    job: Name
    generation: Generation
    rank: int
    pid: int
    at: float
    exit_code: int | None = None
    signal: int | None = None
    detail: Text = ""
    """Last line of the rank's error, if there is one."""


class AssignmentReport(Message, frozen=True, kw_only=True, tag="assignment_report"):
    """What one generation does on this node; sent whenever it changes, and all of them after each hello."""

    job: Name
    generation: Generation
    plan_id: Name
    phase: SeenPhase
    at: float
    detail: Text = ""
    reason: str = ""
    """Machine-readable cause of a failure: `port_busy`, `policy`, `checkpoint`, `older_generation`, `runner`."""
    master_port: int | None = None
    fingerprint: str = ""
    fingerprint_parts: dict[str, str] = {}
    proof: StopProof | None = None
    boot_id: str = ""
    """Boot in which this was seen; an outbox on disk may bring it after another one."""
    keeps_lease: bool = False
    """The runner speaks a protocol in which it keeps the lease."""
    launch: LaunchSpec | None = None
    """What really runs here, with phase `running`: a server whose backup is older than this generation learns it."""


class FaultState(StrEnum):
    ARMED = "armed"
    APPLIED = "applied"
    UNDONE = "undone"
    REFUSED = "refused"
    EXPIRED = "expired"


class FaultReport(Message, frozen=True, kw_only=True, tag="fault_report"):
    drill: Name
    state: FaultState
    at: float
    detail: Text = ""


class ProbeOutcome(StrEnum):
    REACHABLE = "reachable"
    """The node's kernel answered: a connection, or its refusal."""
    UNREACHABLE = "unreachable"
    """No answer within the limit, or no way to the host."""
    FAILED = "failed"
    """The probe itself did not work; says nothing about the node."""


class ProbeReport(Message, frozen=True, kw_only=True, tag="probe_report"):
    probe: Name
    outcome: ProbeOutcome
    at: float
    detail: Text = ""


class OutboxGap(Message, frozen=True, kw_only=True, tag="outbox_gap"):
    """Durable messages that the agent had to drop: shown on the timeline, never silent."""

    first_seq: int
    last_seq: int
    reason: Text


# --- Server to agent ----------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    protocol: int
    server_version: str
    at: float
    heartbeat_interval_s: float
    acknowledged: int
    """Durable messages of this outbox that the server already holds."""


class HeartbeatReply(Message, frozen=True, kw_only=True, tag="heartbeat_reply"):
    at: float
    echo_at: float
    revision: int
    """The revision that this node should be at; a higher one than the agent's is pushed as an `Order`."""
    grants_lease: bool = False
    """The server can write down that it heard this node, so that the lease counts from the echoed heartbeat on."""


class Order(Message, frozen=True, kw_only=True, tag="order"):
    """All that this node should run. A generation that it does not name is left alone and reported."""

    revision: int
    assignments: list[Assignment] = []
    faults: list[FaultOrder] = []
    probes: list[ProbeOrder] = []
    memory_of: list[Name] | None = None
    """Jobs whose snapshots in this node's memory may be needed still; None: not known, so that nothing is removed."""


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """The server has committed every durable message up to and including `through`."""

    through: int


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """Last words before a close, in either direction: why, and what to do."""

    code: int
    reason: Text


FromAgent = (
    Hello
    | Heartbeat
    | GpuSamples
    | StepReports
    | RankStarted
    | RankResumed
    | CheckpointSaved
    | CheckpointRehashed
    | SnapshotKept
    | SaveInTrouble
    | RankPhase
    | RankFinished
    | RankExited
    | AssignmentReport
    | FaultReport
    | ProbeReport
    | OutboxGap
    | Goodbye
)
FromServer = Welcome | HeartbeatReply | Order | Ack | Goodbye

DURABLE = (
    StepReports,
    RankStarted,
    RankResumed,
    CheckpointSaved,
    CheckpointRehashed,
    SnapshotKept,
    SaveInTrouble,
    RankPhase,
    RankFinished,
    RankExited,
    AssignmentReport,
    FaultReport,
    ProbeReport,
    OutboxGap,
)
"""Numbered, kept by the agent until acknowledged, and stored exactly once by the server."""
