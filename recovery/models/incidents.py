"""Incidents and their timelines."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from recovery.models.drills import Drill
from recovery.models.jobs import Job


class IncidentRow(models.Model):
    """One incident. `body` holds the domain value; the columns beside it are what queries and constraints need."""

    id = models.CharField(primary_key=True, max_length=40)
    kind = models.CharField(max_length=20, default="job")
    """`job`, or `control_plane`: too many nodes fell silent at once, so that none of it is believed."""
    job = models.ForeignKey(Job, null=True, on_delete=models.CASCADE, related_name="incidents")
    """None for a control-plane incident."""
    state = models.CharField(max_length=30)
    ended = models.BooleanField(default=False)
    opened_at = models.FloatField()
    ended_at = models.FloatField(null=True)
    deadline_at = models.FloatField(null=True)
    drill = models.ForeignKey(Drill, null=True, on_delete=models.SET_NULL, related_name="incidents")
    body = models.JSONField()
    command = models.CharField(max_length=20, blank=True)
    """An operator's wish that the next step takes: pause, resume, retry, close."""
    receipt = models.JSONField(null=True)
    version = models.BigIntegerField(default=0)
    advance_attempts = models.IntegerField(default=0)
    """Steps begun since the last one that was saved: a step that kills its worker is stopped by this."""

    class Meta:
        ordering = ("-opened_at",)
        constraints = (
            models.UniqueConstraint(fields=("job",), condition=Q(ended=False), name="one_open_incident_per_job"),
            models.UniqueConstraint(
                fields=("kind",), condition=Q(ended=False, kind="control_plane"), name="one_open_control_plane_incident"
            ),
        )

    def __str__(self) -> str:
        return self.id


class TimelineEntry(models.Model):
    """One sentence of an incident's story. Append-only: numbered without holes, each hashed with its predecessor."""

    incident = models.ForeignKey(IncidentRow, on_delete=models.CASCADE, related_name="entries")
    seq = models.IntegerField()
    occurred_at = models.FloatField()
    recorded_at = models.FloatField()
    kind = models.CharField(max_length=20)
    text = models.TextField()
    data = models.JSONField(default=dict)
    previous_hash = models.CharField(max_length=64, blank=True)
    hash = models.CharField(max_length=64)

    class Meta:
        ordering = ("incident", "seq")
        constraints = (models.UniqueConstraint(fields=("incident", "seq"), name="timeline_without_holes"),)
