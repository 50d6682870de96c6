"""Asks agents to look at nodes that fell silent, so that silence is not all that is known. The sweep calls it."""

from __future__ import annotations

import time

from django.db import transaction
from django.db.models import F

from recovery.domain.silence import Contact
from recovery.ids import fresh_id
from recovery.models import Node, Probe, ShareRow
from recovery.store.situations import load_fleet
from recovery.wakeup import push_orders

_ASK_AGAIN_AFTER_S = 10.0
_ANSWER_WITHIN_S = 8.0
_KEPT_S = 3600.0
_AT_MOST = 20
"""Silent nodes that are looked at in one round: if there are more, the breaker has the word."""


def ask_for_probes() -> None:
    """For each silent node that holds a generation, ask one node in contact to knock; a job's own nodes come first."""
    now = time.time()
    Probe.objects.filter(asked_at__lt=now - _KEPT_S).delete()
    fleet = load_fleet(now)
    silent = [node for node in fleet.nodes if node.contact in (Contact.SUSPECT, Contact.LOST)]
    lookers = [node for node in fleet.nodes if node.contact is Contact.SEEN and node.health.value != "unknown"]
    if not silent or not lookers:
        return
    rows = {node.name: node for node in Node.objects.filter(name__in=[n.name for n in (*silent, *lookers)])}
    for node in silent[:_AT_MOST]:
        target = rows[node.name]
        if Probe.objects.filter(node=target, asked_at__gt=now - _ASK_AGAIN_AFTER_S).exists():
            continue
        if not ShareRow.objects.filter(node=target, proof__isnull=True, generation__run_ordered_at__gt=0).exists():
            continue
        able = [rows[looker.name] for looker in lookers if rows[looker.name].protocol >= 2]
        if not able:
            return
        nearest = next((row for row in able if row.claimed_by_id == target.claimed_by_id), able[0])
        with transaction.atomic():
            Probe.objects.create(
                id=fresh_id("prb"), node=target, prober=nearest, asked_at=now, not_after=now + _ANSWER_WITHIN_S
            )
            Node.objects.filter(pk=nearest.pk).update(revision=F("revision") + 1)
            push_orders()
