"""What must hold at every moment, whatever went wrong: pure checks over one job's history and over one step.

The simulator runs them after every event. They share no code with the machine's decisions: a rule that the machine and
its judge both got from one function would hold by construction and prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agents.protocol.messages import AssignmentPhase
from recovery.domain.fleet import FleetSnapshot, NodeHealth
from recovery.domain.generations import NONFINITE_STEPS, FenceProof, GenerationView, ProofKind, RankView
from recovery.domain.incident import TRANSITIONS, Incident, IncidentState
from recovery.domain.instructions import Instruction, JobState, PreparePlan, RecordProof, RunPlan
from recovery.domain.plan import CheckpointRef, RecoveryPlan
from recovery.domain.policy import Policy
from recovery.domain.receipt import Receipt


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One broken rule, told so that a reader can find it."""

    rule: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class LivingRank:
    """A process that exists right now, by the operating system's word."""

    job: str
    generation: int
    node: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class IncidentHistory:
    """An incident as it stands, and the way it came."""

    incident: Incident
    states: tuple[IncidentState, ...]
    """Every state it was in, in order; the last is the present one."""
    receipt: Receipt | None = None
    opened_after_end: bool = False
    """All ranks of the broken generation had ended well when it was opened."""


@dataclass(frozen=True, kw_only=True)
class JobHistory:
    """All that is known of one job."""

    job: str
    state: JobState
    generations: tuple[GenerationView, ...]
    """In the order of their creation."""
    incidents: tuple[IncidentHistory, ...] = ()
    adopted: frozenset[int] = frozenset()
    """Generations that nobody here ordered to run: they were found running, after a backup was restored."""


def violations_among_living(living: Iterable[LivingRank]) -> tuple[Violation, ...]:
    """Never two generations of a job with a process at once, and never two jobs on one node."""
    return tuple(_among_living(living))


def violations_of_job(history: JobHistory, *, fleet: FleetSnapshot, policy: Policy) -> tuple[Violation, ...]:
    """Rules that hold at every moment of a job's life."""
    return (
        *_generation_numbers(history),
        *_fences(history),
        *_claims(history, fleet),
        *_parents(history),
        *_ends(history),
        *(found for incident in history.incidents for found in _incident(incident, policy)),
        *_one_open_incident(history),
    )


def violations_of_step(
    *,
    job: str,
    generations: Sequence[GenerationView],
    checkpoints: Sequence[CheckpointRef],
    fleet: FleetSnapshot,
    instructions: Sequence[Instruction],
    sane_steps: int,
) -> tuple[Violation, ...]:
    """Rules of the moment of commit: the world as it is when instructions take effect, not as it was when decided."""
    found: list[Violation] = []
    for instruction in instructions:
        match instruction:
            case RunPlan(generation=number, fences=fences):
                found += _may_run(job, generations, number)
                found += _stands_on_proofs(job, generations, number, fences)
            case RecordProof(generation=number, proof=proof):
                found += _may_prove(job, generations, number, proof)
            case PreparePlan(plan=plan):
                found += _may_prepare(job, generations, plan)
                found += _may_place(plan, fleet)
                found += _may_resume(plan, generations, checkpoints)
                found += _may_load(plan, generations, sane_steps)
    return tuple(found)


# --- Processes ----------------------------------------------------------------------------------------------------


def _among_living(living: Iterable[LivingRank]) -> Iterator[Violation]:
    generations: dict[str, set[int]] = {}
    jobs: dict[str, set[str]] = {}
    for process in living:
        generations.setdefault(process.job, set()).add(process.generation)
        jobs.setdefault(process.node, set()).add(process.job)
    for job, numbers in generations.items():
        if len(numbers) > 1:
            yield Violation(
                rule="one-generation-alive", sentence=f"Generations {_list(numbers)} of {job} have processes at once."
            )
    for node, owners in jobs.items():
        if len(owners) > 1:
            yield Violation(rule="one-job-per-node", sentence=f"{_list(owners)} have processes on {node} at once.")


# --- Generations --------------------------------------------------------------------------------------------------


def _generation_numbers(history: JobHistory) -> Iterator[Violation]:
    for before, after in pairwise(history.generations):
        if after.number <= before.number:
            yield Violation(
                rule="numbers-rise",
                sentence=f"{history.job}: generation {after.number} was made after generation {before.number}.",
            )


def _fences(history: JobHistory) -> Iterator[Violation]:
    """Of the generations that were ordered to run, only the newest may lack proofs of stop."""
    ran = [generation for generation in history.generations if generation.run_ordered]
    if ran and ran[-1].number in history.adopted:
        return  # what its order stood on is lost; what is ordered after it must stand on proofs again
    for generation in ran[:-1]:
        missing = _without_proof(generation)
        if missing:
            yield Violation(
                rule="fenced-before-run",
                sentence=f"{history.job}: generation {ran[-1].number} was ordered to run, but generation "
                f"{generation.number} is not proven gone from {_list(missing)}.",
            )


def _claims(history: JobHistory, fleet: FleetSnapshot) -> Iterator[Violation]:
    """A node that may hold a process of the job is claimed by it, so that no other job is placed there."""
    for generation in history.generations:
        if not generation.run_ordered:
            continue
        for name in _without_proof(generation):
            node = fleet.node(name)
            if node is None or node.claimed_by != history.job:
                owner = "nobody" if node is None or node.claimed_by is None else node.claimed_by
                yield Violation(
                    rule="claimed-while-in-use",
                    sentence=f"{name} may still hold generation {generation.number} of {history.job}, "
                    f"but {owner} has claimed it.",
                )


def _parents(history: JobHistory) -> Iterator[Violation]:
    numbers = {generation.number for generation in history.generations}
    for generation in history.generations:
        parent = generation.plan.parent
        if generation.number in history.adopted:
            continue  # its parent may be lost with the rows that a backup was too old for
        if parent is not None and (parent.generation >= generation.number or parent.generation not in numbers):
            yield Violation(
                rule="parent-is-older",
                sentence=f"{history.job}: generation {generation.number} names {parent} as its parent, "
                "which no older generation can have written.",
            )


def _ends(history: JobHistory) -> Iterator[Violation]:
    newest = history.generations[-1] if history.generations else None
    if history.state is JobState.SUCCEEDED and (newest is None or not _all_ended_well(newest)):
        yield Violation(
            rule="success-is-proven",
            sentence=f"{history.job} is called succeeded, but not every rank of its newest generation did its last "
            "step and exited with 0.",
        )
    if history.state in (JobState.STOPPED, JobState.FAILED, JobState.SUCCEEDED):
        for generation in history.generations:
            if generation.wanted is not AssignmentPhase.STOP:
                yield Violation(
                    rule="ended-jobs-want-nothing",
                    sentence=f"{history.job} is {history.state.value}, but its generation {generation.number} is "
                    f"still wanted: {generation.wanted.value}.",
                )


# --- Incidents ----------------------------------------------------------------------------------------------------


def _incident(history: IncidentHistory, policy: Policy) -> Iterator[Violation]:
    incident = history.incident
    for before, after in pairwise(history.states):
        if after not in TRANSITIONS[before]:
            yield Violation(
                rule="transitions-hold",
                sentence=f"{incident.id} went from {before.value} to {after.value}, which is no transition.",
            )
    if not incident.ended and incident.state is not IncidentState.ESCALATED and incident.deadline_at is None:
        yield Violation(
            rule="open-means-deadline",
            sentence=f"{incident.id} is {incident.state.value} without a deadline and without a page.",
        )
    if incident.state in (IncidentState.ESCALATED, IncidentState.WAITING_FOR_FENCE) and not incident.escalation:
        yield Violation(
            rule="escalation-has-a-reason", sentence=f"{incident.id} is {incident.state.value} without a reason."
        )
    if incident.state is IncidentState.RECOVERED and history.receipt is None:
        yield Violation(rule="recovered-has-a-receipt", sentence=f"{incident.id} is recovered without a receipt.")
    if history.opened_after_end:
        yield Violation(
            rule="normal-end-is-no-incident",
            sentence=f"{incident.id} was opened on generation {incident.broken_generation} of {incident.job}, "
            "which had ended well on every rank.",
        )
    yield from _budgets(incident, policy)


def _budgets(incident: Incident, policy: Policy) -> Iterator[Violation]:
    spent = (
        ("attempts", incident.attempt, policy.max_attempts),
        ("plans", incident.plans_made, policy.max_plans),
        ("roll-backs", incident.rollbacks, policy.max_rollbacks),
    )
    for what, count, limit in spent:
        if count > limit:
            yield Violation(
                rule="budgets-hold", sentence=f"{incident.id} has made {count} {what}; the limit is {limit}."
            )
    plan = incident.plan
    if plan is not None and plan.generation <= incident.broken_generation:
        yield Violation(
            rule="numbers-rise",
            sentence=f"{incident.id} plans generation {plan.generation} to replace {incident.broken_generation}.",
        )


def _one_open_incident(history: JobHistory) -> Iterator[Violation]:
    open_ones = [past.incident.id for past in history.incidents if not past.incident.ended]
    if len(open_ones) > 1:
        yield Violation(rule="one-open-incident", sentence=f"{_list(open_ones)} of {history.job} are open at once.")


# --- The moment of commit -----------------------------------------------------------------------------------------


def _may_run(job: str, generations: Sequence[GenerationView], number: int) -> Iterator[Violation]:
    known = {generation.number: generation for generation in generations}
    if number not in known:
        yield Violation(rule="run-what-was-prepared", sentence=f"{job}: run of generation {number}, which is unknown.")
        return
    if known[number].wanted is not AssignmentPhase.PREPARE:
        yield Violation(
            rule="run-what-was-prepared",
            sentence=f"{job}: run of generation {number}, which was wanted: {known[number].wanted.value}.",
        )
    done = _steps_done(generation for generation in generations if generation.number < number)
    if known[number].plan.parent is None and done:
        yield Violation(
            rule="no-silent-start",
            sentence=f"{job}: generation {number} is to run from the beginning, but step {done} was reached before.",
        )
    for older in generations:
        if older.number >= number or not older.run_ordered:
            continue
        missing = _without_proof(older)
        if missing:
            yield Violation(
                rule="fenced-before-run",
                sentence=f"{job}: run of generation {number} was ordered while generation {older.number} is not "
                f"proven gone from {_list(missing)}.",
            )


def _stands_on_proofs(
    job: str, generations: Sequence[GenerationView], number: int, fences: Sequence[FenceProof]
) -> Iterator[Violation]:
    """The order names a proof for each node of the generation that ran before."""
    before = [older for older in generations if older.number < number and older.run_ordered]
    if not before:
        return
    old = max(before, key=lambda older: older.number)
    named = {proof.node for proof in fences if proof.generation in (None, old.number)}
    missing = [share.node for share in old.shares if share.node not in named]
    if missing:
        yield Violation(
            rule="run-stands-on-proofs",
            sentence=f"{job}: the order to run generation {number} names no proof that generation {old.number} is gone "
            f"from {_list(missing)}.",
        )


def _may_prove(job: str, generations: Sequence[GenerationView], number: int, proof: FenceProof) -> Iterator[Violation]:
    """A lease proves something only where one was kept, and where a rank elsewhere has stopped, by somebody's word."""
    generation = _numbered(number, generations)
    share = next((share for share in generation.shares if share.node == proof.node), None) if generation else None
    if generation is None or share is None:
        yield Violation(rule="lease-is-kept", sentence=f"{job}: a proof for {proof.node}, which has no share of it.")
        return
    if proof.kind is not ProofKind.LEASE_EXPIRED:
        return
    if generation.lease is None or not share.keeps_lease:
        yield Violation(
            rule="lease-is-kept",
            sentence=f"{job}: generation {number} is called out of its lease on {proof.node}, but it keeps none.",
        )
    elsewhere = [other.proof for other in generation.shares if other.node != proof.node and other.proof is not None]
    stops = [other for other in elsewhere if other.kind not in (ProofKind.LEASE_EXPIRED, ProofKind.NEVER_STARTED)]
    exits = [rank for rank in generation.ranks if rank.node != proof.node and rank.exited_at is not None]
    if not stops and not exits:
        yield Violation(
            rule="lease-needs-a-stopped-peer",
            sentence=f"{job}: generation {number} is called out of its lease on {proof.node}, but no rank of it on "
            "another node is known to have stopped.",
        )


def _may_prepare(job: str, generations: Sequence[GenerationView], plan: RecoveryPlan) -> Iterator[Violation]:
    newest = max((generation.number for generation in generations), default=0)
    if plan.generation <= newest:
        yield Violation(
            rule="numbers-rise",
            sentence=f"{job}: generation {plan.generation} was planned, but generation {newest} exists.",
        )
    if plan.job != job:
        yield Violation(rule="own-job-only", sentence=f"A plan for {plan.job} was made while looking at {job}.")
    if len(set(plan.nodes)) != len(plan.nodes):
        yield Violation(rule="placement", sentence=f"{job}: generation {plan.generation} names a node twice.")


def _may_place(plan: RecoveryPlan, fleet: FleetSnapshot) -> Iterator[Violation]:
    for name in plan.nodes:
        node = fleet.node(name)
        problem = ""
        if node is None:
            problem = "never joined"
        elif node.health is not NodeHealth.HEALTHY:
            problem = f"is {node.health.value}"
        elif node.quarantined:
            problem = "is quarantined"
        elif node.unconfirmed:
            problem = f"may still hold {node.unconfirmed}"
        elif node.cordoned:
            problem = "is cordoned"
        elif node.claimed_by not in (None, plan.job):
            problem = f"is claimed by {node.claimed_by}"
        elif node.slots < plan.ranks_per_node:
            problem = f"has {node.slots} slots for {plan.ranks_per_node} ranks"
        if problem:
            yield Violation(
                rule="placement",
                sentence=f"Generation {plan.generation} of {plan.job} was placed on {name}, which {problem}.",
            )


def _may_resume(
    plan: RecoveryPlan, generations: Sequence[GenerationView], checkpoints: Sequence[CheckpointRef]
) -> Iterator[Violation]:
    where = f"Generation {plan.generation} of {plan.job}"
    if plan.parent is None:
        done = _steps_done(generations)
        if done:
            yield Violation(
                rule="no-silent-start",
                sentence=f"{where} starts from the beginning, but step {done} was reached before.",
            )
        return
    if plan.parent not in checkpoints:
        yield Violation(
            rule="parent-is-complete", sentence=f"{where} resumes from {plan.parent}, which was never complete."
        )
    for ancestor in _ancestors(plan.parent.generation, generations):
        if ancestor.broken_continuity:
            yield Violation(
                rule="parent-is-trusted",
                sentence=f"{where} resumes from {plan.parent}, which descends from generation {ancestor.number}, "
                "whose continuity is broken.",
            )
        lost = _not_restored(ancestor)
        if lost:
            yield Violation(
                rule="parent-is-trusted",
                sentence=f"{where} resumes from {plan.parent}, which descends from generation {ancestor.number}, "
                f"where {lost}.",
            )
    later = _sound_and_trained(generations)
    if not later:
        return
    tip = later[-1]
    limit: int | None = None
    generation: GenerationView | None = tip
    while generation is not None:
        if generation.number == plan.parent.generation:
            if limit is not None and plan.parent.step > limit:
                break
            return
        came_from = generation.plan.parent
        limit = came_from.step if came_from else None
        generation = _numbered(came_from.generation, generations) if came_from else None
    yield Violation(
        rule="parent-is-on-the-lineage",
        sentence=f"{where} resumes from {plan.parent}, which is off the lineage of generation {tip.number}.",
    )


def _may_load(plan: RecoveryPlan, generations: Sequence[GenerationView], sane_steps: int) -> Iterator[Violation]:
    """Never again what a generation had loaded whose loss was lost soon after, nor what it saved once it was lost."""
    if plan.parent is None:
        return
    for generation in generations:
        lost = [rank.nonfinite_since for rank in generation.ranks if rank.nonfinite_count >= NONFINITE_STEPS]
        first = min((step for step in lost if step is not None), default=None)
        if first is None:
            continue
        loaded = generation.plan.parent == plan.parent and first - plan.parent.step <= sane_steps
        saved = generation.number == plan.parent.generation and plan.parent.step >= first
        if loaded or saved:
            yield Violation(
                rule="tainted-is-never-loaded",
                sentence=f"Generation {plan.generation} of {plan.job} resumes from {plan.parent}, though the loss of "
                f"generation {generation.number}, which {'had loaded' if loaded else 'saved'} it, was lost at step "
                f"{first}.",
            )


# --- Words and small readings -------------------------------------------------------------------------------------


def _steps_done(generations: Iterable[GenerationView]) -> int:
    return max((rank.last_step or 0 for g in generations if not g.broken_continuity for rank in g.ranks), default=0)


def _not_restored(generation: GenerationView) -> str:
    """What the digests say was not restored in a generation; empty if all was."""
    for rank in generation.ranks:
        for part in rank.saved_digest:
            if rank.live_digest.get(part) != rank.saved_digest[part]:
                return f"rank {rank.rank} did not restore the {part}"
    return ""


def _numbered(number: int, generations: Sequence[GenerationView]) -> GenerationView | None:
    return next((generation for generation in generations if generation.number == number), None)


def _ancestors(number: int, generations: Sequence[GenerationView]) -> Iterator[GenerationView]:
    """The generation of that number, its parent's, and so on."""
    seen: set[int] = set()
    generation = _numbered(number, generations)
    while generation is not None and generation.number not in seen:
        seen.add(generation.number)
        yield generation
        parent = generation.plan.parent
        generation = _numbered(parent.generation, generations) if parent else None


def _sound_and_trained(generations: Sequence[GenerationView]) -> list[GenerationView]:
    return [
        generation
        for generation in generations
        if any(rank.resumed_step is not None or rank.last_step is not None for rank in generation.ranks)
        and not any(ancestor.broken_continuity for ancestor in _ancestors(generation.number, generations))
    ]


def _without_proof(generation: GenerationView) -> list[str]:
    return [share.node for share in generation.shares if share.proof is None]


def _all_ended_well(generation: GenerationView) -> bool:
    return len(generation.ranks) == generation.plan.world_size and all(map(_did_all_and_left, generation.ranks))


def _did_all_and_left(rank: RankView) -> bool:
    return rank.finished_step is not None and rank.exit_code == 0 and not rank.signal


def _list(names: Iterable[object]) -> str:
    return ", ".join(str(name) for name in sorted(names, key=str))
