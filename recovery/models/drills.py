"""Drills: faults injected on purpose, with a promise that recovery must keep."""

from __future__ import annotations

from django.db import models

from recovery.models.fleet import Node
from recovery.models.jobs import Job


class Drill(models.Model):
    id = models.CharField(primary_key=True, max_length=40)
    kind = models.CharField(max_length=30)
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="drills")
    node = models.ForeignKey(Node, null=True, on_delete=models.PROTECT, related_name="drills")
    """None where the server itself is the target."""
    generation_number = models.IntegerField()
    rank = models.IntegerField(null=True)
    duration_s = models.FloatField(default=0.0)
    """After this long the fault is undone; 0 for faults that need no undoing."""
    steps_after_save = models.IntegerField(default=0)
    state = models.CharField(max_length=20)
    """requested -> armed -> applied -> undone -> passed | failed; or refused, expired."""
    ended = models.BooleanField(default=False)
    detail = models.TextField(blank=True)
    promise = models.JSONField()
    """{"kind": "recovered", "recovered_within_s": seconds, "continuity": "proven"}, or {"kind": "unharmed"}: no step
    lost, no incident against the job, no event lost."""
    before = models.JSONField(default=dict)
    """What was so when the fault was asked for: generation, last step, gaps told. An unharmed job is held to it."""
    requested_by = models.CharField(max_length=150)
    requested_at = models.FloatField()
    not_after = models.FloatField()
    applied_at = models.FloatField(null=True)
    undone_at = models.FloatField(null=True)
    away_s = models.FloatField(default=0.0)
    """Time in which the control plane did not look: no limit of the drill counts it."""
    ended_at = models.FloatField(null=True)
    result = models.JSONField(default=dict)

    class Meta:
        ordering = ("-requested_at",)
        constraints = (
            models.UniqueConstraint(fields=("job",), condition=models.Q(ended=False), name="one_drill_at_a_time"),
        )

    def __str__(self) -> str:
        return self.id
