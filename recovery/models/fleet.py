"""Nodes and what is known of them."""

from __future__ import annotations

from django.db import models


class Node(models.Model):
    """One machine with an agent. Socket state is kept apart from health: a closed socket is not a dead node."""

    name = models.CharField(max_length=200, unique=True)
    credential_hash = models.CharField(max_length=64, blank=True)
    revoked = models.BooleanField(default=False)
    joined_at = models.FloatField()

    address = models.CharField(max_length=200, default="127.0.0.1")
    facts = models.JSONField(default=dict)
    agent_version = models.CharField(max_length=60, blank=True)
    boot_id = models.CharField(max_length=200, blank=True)

    session = models.CharField(max_length=60, blank=True)
    """The newest connection of this identity; empty when none is open."""
    connected_since = models.FloatField(null=True)
    last_heard_at = models.FloatField(null=True)
    """Server's clock; written every few seconds, the web process knows the exact value."""
    clock_offset_s = models.FloatField(default=0.0)
    """Add to the agent's clock to get the server's."""

    outbox_id = models.CharField(max_length=200, blank=True)
    acknowledged_seq = models.BigIntegerField(default=0)

    revision = models.BigIntegerField(default=0)
    """Rises with every change of what this node should run."""
    seen_revision = models.BigIntegerField(default=0)

    unhealthy_reason = models.CharField(max_length=400, blank=True)
    cordoned = models.BooleanField(default=False)
    claimed_by = models.ForeignKey("recovery.Job", null=True, on_delete=models.SET_NULL, related_name="claimed_nodes")

    gpus = models.JSONField(default=list)
    """Latest sample of each GPU."""
    gpus_at = models.FloatField(null=True)

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name
