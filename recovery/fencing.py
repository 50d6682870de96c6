"""Makes sure that a silent node is off: by an operator's attestation, or by asking a fence provider.

The REST API, the pages and the CLI ask here; the task `fence_node` and the sweep drive what was asked for. An action is
a row: a worker that dies over it loses nothing, and what is told of it stands on the timelines of the jobs concerned.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime

from django.conf import settings
from django.db import IntegrityError, connections, transaction
from django.db.models import F

from agents.protocol.messages import ProofKind
from recovery import proofs
from recovery.domain.absences import peers_step_on
from recovery.domain.fence_policy import (
    MAX_ATTEMPTS,
    FenceCandidate,
    next_attempt_at,
    nodes_to_fence,
    why_not_fenced,
)
from recovery.domain.incident import Incident, IncidentState
from recovery.domain.silence import Contact, judge_silence
from recovery.domain.timeline import EntryKind
from recovery.errors import FenceRefused, NotConfirmed, NotFound
from recovery.fence_providers import FencedNode, FenceProvider, FenceResult, configured_provider
from recovery.ids import fresh_id
from recovery.models import FenceAction, IncidentRow, Node, ShareRow
from recovery.store import from_json
from recovery.store.situations import generation_view, load_fleet, load_observers, load_situation, silence_limits
from recovery.wakeup import announce_change, ask_to_fence

log = logging.getLogger(__name__)

MAX_STATEMENT = 1000
TASK_LIMIT_S = 270
"""Longer than the longest run of a provider, shorter than the broker waits before it delivers a task once more."""
_TAKE_OVER_AFTER_S = 15.0
"""Beyond a provider's own limit: then the worker that asked it is taken for dead."""
_SAME_WORD_S = 0.5
"""One word of a node is dated anew with each beat of its observer, as clocks are put right; more is another word."""
AUTOMATIC = "everstep"
"""Who asks where the policy does."""


def attest_power_off(node_name: str, *, confirm: str, statement: str, by: str) -> FenceAction:
    """Take an operator's word that a node is powered off, as a proof for all that may still run on it.

    Raises `NotFound`, `NotConfirmed` if `confirm` is not the node's name to the letter, and `FenceRefused` if the node
    is in contact or nothing waits for its proof.
    """
    said = _clean(statement)
    with transaction.atomic():
        node, shares = _ready_to_fence(node_name, confirm)
        now = time.time()
        evidence = f"{by} attested at {_moment(now)} that {node.name} is powered off"
        evidence += f": {said!r}" if said else ", without a further statement"
        action = FenceAction.objects.create(
            id=fresh_id("fen"),
            node=node,
            kind="attestation",
            state="fenced",
            boot_id=node.boot_id,
            requested_by=by,
            requested_at=now,
            ended_at=now,
            evidence=evidence,
        )
        text = f"{by} attests that {node.name} is powered off" + (f": {said}" if said else ".")
        _tell(action, shares, text, kind=EntryKind.OPERATOR)
        proofs.fence_node(node, kind=ProofKind.ATTESTATION, at=now, evidence=evidence)
        announce_change("fleet")
    log.warning("node=%s fence=%s %s", node.name, action.pk, evidence)
    return action


def request_fence(node_name: str, *, confirm: str, by: str) -> FenceAction:
    """Ask the fence provider to switch a node off. Raises as `attest_power_off` does."""
    provider = configured_provider()
    if provider is None:
        raise FenceRefused(
            f"Nobody can switch {node_name} off from here: no fence provider is configured (EVERSTEP_FENCE_COMMAND). "
            "Switch it off yourself and attest it."
        )
    try:
        with transaction.atomic():
            node, shares = _ready_to_fence(node_name, confirm)
            return _request(node, shares, by=by, provider=provider)
    except IntegrityError as err:
        raise FenceRefused(f"{node_name} is being fenced already: wait for what comes of it.") from err


def _request(node: Node, shares: list[ShareRow], *, by: str, provider: FenceProvider) -> FenceAction:
    """Must run inside a transaction. Raises `IntegrityError` if one is under way."""
    action = FenceAction.objects.create(
        id=fresh_id("fen"),
        node=node,
        kind="provider",
        state="requested",
        boot_id=node.boot_id,
        requested_by=by,
        requested_at=time.time(),
    )
    text = f"{by} asked the fence provider ({provider.name}) to switch {node.name} off."
    _tell(action, shares, text, kind=EntryKind.DECISION if by == AUTOMATIC else EntryKind.OPERATOR)
    announce_change("fleet")
    ask_to_fence(action.pk)
    return action


def _ready_to_fence(node_name: str, confirm: str) -> tuple[Node, list[ShareRow]]:
    """The node, taken for this transaction, and what may still run on it. Raises what the callers say."""
    node = _take(node_name)
    if confirm != node.name:
        raise NotConfirmed(f"Type the node's exact name, {node.name}, to confirm; {confirm!r:.100} is not it.")
    contact, silent_s = _contact(node)
    unproven = proofs.unproven_on(node)
    shares = proofs.open_shares(node)
    candidate = FenceCandidate(
        name=node.name, contact=contact, silent_s=silent_s, unproven=unproven, trains_on=_trains_on(shares)
    )
    refusal = why_not_fenced(candidate)
    if refusal:
        raise FenceRefused(refusal)
    return node, shares


def _trains_on(shares: Iterable[ShareRow]) -> tuple[str, ...]:
    """Jobs of these shares of which a rank on another node is known to step on."""
    now = time.time()
    fleet = load_fleet(now)
    return tuple(
        share.generation.job.name
        for share in shares
        if peers_step_on(
            generation_view(share.generation),
            fleet,
            synchronous=share.generation.job.spec.get("synchronous", True),
            now=now,
        )
    )


def _take(node_name: str) -> Node:
    """The row is taken before it is read: a hello that comes in at this moment counts, or comes after."""
    Node.objects.filter(name=node_name).update(name=F("name"))
    node = Node.objects.filter(name=node_name).first()
    if node is None:
        raise NotFound(f"There is no node {node_name}: it never joined under this name.")
    return node


def _contact(node: Node) -> tuple[Contact, float]:
    """By the node's own row: one whose credential was revoked has left the fleet, but it may still train."""
    silence = judge_silence(
        last_heard_at=node.last_heard_at,
        observer=node.observer,
        observers=load_observers(),
        now=time.time(),
        limits=silence_limits(),
    )
    return silence.contact, silence.silent_s


# --- Driving an action --------------------------------------------------------------------------------------------


def drive_fence_action(action_id: str) -> None:
    """Take one action as far as it goes now: ask the provider, keep the proof, or give up and page.

    Safe to call any number of times at once: a run is claimed by a conditional update, and one whose worker died is
    claimed anew once its time is up. Runs for as long as the provider's limit.
    """
    provider = configured_provider()
    claimed = _claim(action_id, provider)
    if claimed is None or provider is None:
        return
    node = claimed.node
    result = provider.power_off(FencedNode(name=node.name, address=node.address))
    _keep_result(claimed, result, heard_before=node.last_heard_at)


def is_due(action: FenceAction, now: float) -> bool:
    """Whether there is something to do about an action now."""
    if action.state == "running":
        limit_s = settings.EVERSTEP_FENCE_TIMEOUT_S + _TAKE_OVER_AFTER_S
        return action.started_at is None or now - action.started_at > limit_s
    if action.state != "requested":
        return False
    at = next_attempt_at(attempts=action.attempts, last_ended_at=action.ended_at)
    return at is None or now >= at


def redrive(action_id: str) -> threading.Thread | None:
    """Drive an action that is due in a thread of its own: a provider may take a minute, and the sweep must go on."""
    action = FenceAction.objects.filter(pk=action_id).first()
    if action is None or not is_due(action, time.time()):
        return None
    thread = threading.Thread(target=_drive_and_close, args=(action_id,), name=f"fence-{action_id}", daemon=True)
    thread.start()
    return thread


def _drive_and_close(action_id: str) -> None:
    try:
        drive_fence_action(action_id)
    except Exception:
        log.exception("fence=%s could not be driven; the sweep tries again", action_id)
    finally:
        connections.close_all()


def _claim(action_id: str, provider: FenceProvider | None) -> FenceAction | None:
    """Make the next run of an action ours; None if there is nothing to run now."""
    with transaction.atomic():
        name = FenceAction.objects.filter(pk=action_id).values_list("node__name", flat=True).first()
        if name is None:
            return None
        node = _take(name)  # before the action is read: another worker may be at it
        action = FenceAction.objects.select_related("node").get(pk=action_id)
        now = time.time()
        if not is_due(action, now):
            return None
        shares = proofs.open_shares(node)
        verdict = _why_not_run(action, node, provider)
        if verdict is not None:
            state, why = verdict
            if state:
                _end(action, shares, state=state, evidence=why)
            return None
        claimed = FenceAction.objects.filter(
            pk=action.pk, state=action.state, attempts=action.attempts, started_at=action.started_at
        ).update(state="running", attempts=action.attempts + 1, started_at=now)
        if not claimed:
            return None
        action.refresh_from_db()
        action.node = node
        text = f"Asking the fence provider to switch {node.name} off, attempt {action.attempts} of {MAX_ATTEMPTS}."
        _tell(action, shares, text, kind=EntryKind.ORDER)
        announce_change("fleet")
        return action


def _why_not_run(action: FenceAction, node: Node, provider: FenceProvider | None) -> tuple[str, str] | None:
    """(state to end in, why) if the provider must not be asked now; an empty state means: wait and look again."""
    contact, _ = _contact(node)
    if contact in (Contact.SEEN, Contact.SUSPECT):
        return "cancelled", "It is in contact again, and must not be switched off."
    if contact is Contact.UNOBSERVED:
        return "", ""
    if not proofs.unproven_on(node):
        return "cancelled", "Nothing waits for a proof of it any more."
    if _trains_on(proofs.open_shares(node)):
        return "cancelled", "A job on it trains on, and must not be hurt because its agent cannot be reached."
    if next_attempt_at(attempts=action.attempts, last_ended_at=action.ended_at) is None:
        died = "Its last run did not come to an end: the worker died over it." if action.state == "running" else ""
        return "failed", " ".join(filter(None, (action.evidence, died)))
    if provider is None:
        return "failed", "No fence provider is configured any more (EVERSTEP_FENCE_COMMAND)."
    return None


def _keep_result(claimed: FenceAction, result: FenceResult, *, heard_before: float | None) -> None:
    with transaction.atomic():
        node = _take(claimed.node.name)
        action = FenceAction.objects.filter(pk=claimed.pk, state="running", attempts=claimed.attempts).first()
        if action is None:
            return  # this run took so long that another worker has taken over
        shares = proofs.open_shares(node)
        if (node.last_heard_at or 0.0) > (heard_before or 0.0) + _SAME_WORD_S:
            _end(action, shares, state="cancelled", evidence="It was heard while the provider was asked.")
        elif result.off:
            _end(action, shares, state="fenced", evidence=result.evidence)
            proofs.fence_node(node, kind=ProofKind.PROVIDER, at=time.time(), evidence=result.evidence)
        elif action.attempts >= MAX_ATTEMPTS:
            _end(action, shares, state="failed", evidence=result.evidence)
        else:
            FenceAction.objects.filter(pk=action.pk).update(
                state="requested", ended_at=time.time(), evidence=result.evidence
            )
            text = f"The fence provider does not say that {node.name} is off; it is asked again. {result.evidence}"
            _tell(action, shares, text)
        announce_change("fleet")


def _end(action: FenceAction, shares: list[ShareRow], *, state: str, evidence: str) -> None:
    FenceAction.objects.filter(pk=action.pk).update(state=state, ended_at=time.time(), evidence=evidence)
    name = action.node.name
    match state:
        case "fenced":
            _tell(action, shares, f"The fence provider says that {name} is off.", kind=EntryKind.PROOF)
        case "cancelled":
            _tell(action, shares, f"{name} is not fenced: {evidence}", kind=EntryKind.DECISION)
        case "failed":
            page = f"The fence provider could not switch {name} off in {action.attempts} attempts. {evidence}"
            _tell(action, shares, f"Paged the operators: {page}", kind=EntryKind.PAGE)
            log.error("page: node=%s fence=%s %s", name, action.pk, page)
    announce_change("fleet")


def _tell(action: FenceAction, shares: Iterable[ShareRow], text: str, *, kind: EntryKind = EntryKind.FACT) -> None:
    """Write a sentence into the story of each job that may still run something on the node."""
    for job_id in sorted({share.generation.job_id for share in shares}):
        numbers = sorted(share.generation.number for share in shares if share.generation.job_id == job_id)
        data = {
            "node": action.node.name,
            "fence": action.pk,
            "by": action.requested_by,
            "generations": numbers,
        }
        proofs.tell(job_id, text, kind=kind, data=data)


# --- What the sweep looks after -----------------------------------------------------------------------------------


def look_after_fences() -> None:
    """Find words that turned out wrong, and lost nodes that the policy wants switched off unasked."""
    _note_contradictions()
    if settings.EVERSTEP_FENCE_AUTO:
        _fence_unasked()


def _note_contradictions() -> None:
    """A node whose connection outlived its silence says no second hello: it is heard again all the same."""
    wrong = FenceAction.objects.filter(
        state="fenced",
        contradicted_at__isnull=True,
        boot_id=F("node__boot_id"),
        node__last_heard_at__gt=F("ended_at"),
    ).exclude(boot_id="")
    for node in {action.node for action in wrong.select_related("node")}:
        with transaction.atomic():
            proofs.contradict(node, boot_id=node.boot_id)


def _fence_unasked() -> None:
    provider = configured_provider()
    if provider is None:
        return
    waiting = (IncidentState.STOPPING.value, IncidentState.WAITING_FOR_FENCE.value)
    for row in IncidentRow.objects.filter(ended=False, state__in=waiting, job__isnull=False).select_related("job"):
        assert row.job is not None
        now = time.time()
        for name in nodes_to_fence(from_json(row.body, Incident), load_situation(row.job, now=now), now):
            if FenceAction.objects.filter(node__name=name, kind="provider", requested_at__gte=row.opened_at).exists():
                continue  # once per incident: what it could not do, a person has to look at
            try:
                with transaction.atomic():
                    node = _take(name)
                    _request(node, proofs.open_shares(node), by=AUTOMATIC, provider=provider)
            except IntegrityError:
                log.info("node=%s is being fenced already", name)


def _clean(statement: str) -> str:
    said = " ".join(statement.split())
    if len(said) > MAX_STATEMENT or "\0" in said:
        raise FenceRefused(f"The statement must be text of at most {MAX_STATEMENT} characters; it has {len(said)}.")
    return said


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
