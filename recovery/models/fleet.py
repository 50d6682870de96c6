"""Nodes, what is known of them, and who listens to them."""

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
    observer = models.CharField(max_length=60, blank=True)
    """The web process that hears this node, or was the last to."""
    protocol = models.IntegerField(default=1)
    """Version of the wire that its agent speaks."""
    clock_offset_s = models.FloatField(default=0.0)
    """Add to the agent's clock to get the server's."""

    outbox_id = models.CharField(max_length=200, blank=True)
    acknowledged_seq = models.BigIntegerField(default=0)

    gaps = models.IntegerField(default=0)
    """How often its agent had to tell that messages were lost."""

    revision = models.BigIntegerField(default=0)
    """Rises with every change of what this node should run."""
    seen_revision = models.BigIntegerField(default=0)

    unhealthy_reason = models.CharField(max_length=400, blank=True)
    quarantined_boot_id = models.CharField(max_length=200, blank=True)
    """Not to be used in this boot: something is stuck in its kernel, or an attestation about it was wrong."""
    quarantine_reason = models.CharField(max_length=400, blank=True)
    cordoned = models.BooleanField(default=False)
    claimed_by = models.ForeignKey("recovery.Job", null=True, on_delete=models.SET_NULL, related_name="claimed_nodes")

    gpus = models.JSONField(default=list)
    """Latest sample of each GPU."""
    gpus_at = models.FloatField(null=True)

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class Observer(models.Model):
    """One web process that hears agents. It writes whom it heard and its own beat in one transaction."""

    name = models.CharField(primary_key=True, max_length=60)
    since = models.FloatField()
    """It has listened without a break since then."""
    beat_at = models.FloatField()
    lag_s = models.FloatField(default=0.0)
    """By how much its loop or the database held it up lately."""


class Probe(models.Model):
    """One look at a silent node by another node's agent."""

    id = models.CharField(primary_key=True, max_length=40)
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="probes")
    prober = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="+")
    asked_at = models.FloatField()
    not_after = models.FloatField()
    outcome = models.CharField(max_length=20, blank=True)
    answered_at = models.FloatField(null=True)
    detail = models.TextField(blank=True)

    class Meta:
        ordering = ("-asked_at",)


class FenceAction(models.Model):
    """What was done or attested to make sure that a node is off: by a fence provider or by an operator."""

    id = models.CharField(primary_key=True, max_length=40)
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="fence_actions")
    kind = models.CharField(max_length=20)
    """`provider` or `attestation`."""
    state = models.CharField(max_length=20)
    """requested -> running -> fenced | failed | cancelled; an attestation is `fenced` at once."""
    boot_id = models.CharField(max_length=200, blank=True)
    """Boot of the node that it is about."""
    requested_by = models.CharField(max_length=150)
    requested_at = models.FloatField()
    attempts = models.IntegerField(default=0)
    started_at = models.FloatField(null=True)
    ended_at = models.FloatField(null=True)
    """When it, or its last attempt, ended."""
    evidence = models.TextField(blank=True)
    contradicted_at = models.FloatField(null=True)
    """The node was heard again in the same boot: it was not off."""

    class Meta:
        ordering = ("-requested_at",)
        constraints = (
            models.UniqueConstraint(
                fields=("node",),
                condition=models.Q(state__in=("requested", "running")),
                name="one_fence_action_at_a_time",
            ),
        )
