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
    epoch_size = models.BigIntegerField(null=True)
    indices_digest = models.CharField(max_length=16, blank=True)
    """Checksum of the indices that travelled with the batch; blank: nobody looked."""
    order_digest = models.CharField(max_length=16, blank=True)
    """The same, of those that the order has there; blank: the order does not know."""
    samples = models.BigIntegerField(null=True)
    tokens = models.BigIntegerField(null=True)
    parameter_norm = models.FloatField(null=True)
    data_s = models.FloatField(null=True)
    forward_backward_s = models.FloatField(null=True)
    optimizer_s = models.FloatField(null=True)
    wait_s = models.FloatField(null=True)
    checkpoint_s = models.FloatField(null=True)
    memory_bytes = models.BigIntegerField(null=True)
    gpu_memory_bytes = models.BigIntegerField(null=True)
    probe = models.JSONField(null=True)
    """A `StateProbe`, with the few steps that have one."""

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=("job", "generation_number", "rank", "step"), name="one_row_per_step"),
        )
