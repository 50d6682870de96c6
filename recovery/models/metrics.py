"""Training metrics: one row per finished step of a rank, the record that continuity is judged by."""

from __future__ import annotations

from django.db import models

from recovery.models.jobs import Job


class StepRow(models.Model):
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="steps")
    generation_number = models.IntegerField()
    rank = models.IntegerField()
    step = models.IntegerField()
    at = models.FloatField()
    loss = models.FloatField(null=True)
    """NaN is stored as NULL with `loss_text` "nan", since databases disagree on it."""
    loss_text = models.CharField(max_length=10, blank=True)
    learning_rate = models.FloatField(null=True)
    grad_norm = models.FloatField(null=True)
    epoch = models.IntegerField(default=0)
    span_start = models.BigIntegerField(null=True)
    span_stop = models.BigIntegerField(null=True)
    step_time_s = models.FloatField(null=True)
    probe = models.JSONField(null=True)
    """A `StateProbe`, with the few steps that have one."""

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=("job", "generation_number", "rank", "step"), name="one_row_per_step"),
        )
