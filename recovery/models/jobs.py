"""Jobs, their generations, and what each node and rank of a generation did."""

from __future__ import annotations

from django.db import models

from recovery.models.fleet import Node


class Job(models.Model):
    """A training job. The spec is captured once, at submission."""

    id = models.CharField(primary_key=True, max_length=40)
    name = models.CharField(max_length=200)
    owner = models.CharField(max_length=150, blank=True)
    spec = models.JSONField()
    state = models.CharField(max_length=20)
    reason = models.CharField(max_length=1000, blank=True)
    stop_wanted = models.BooleanField(default=False)

    generation = models.IntegerField(default=0)
    """Highest generation number ever given out; it only rises."""
    behind_since = models.FloatField(null=True)
    """An agent knows a newer generation than this database, which was restored from a backup: nothing is concluded
    until what runs is known."""
    total_steps = models.IntegerField(null=True)
    last_step = models.IntegerField(null=True)
    submitted_at = models.FloatField()
    started_at = models.FloatField(null=True)
    ended_at = models.FloatField(null=True)
    state_since = models.FloatField()
    launch_attempts = models.IntegerField(default=0)
    version = models.BigIntegerField(default=0)

    pinned = models.JSONField(default=list)
    """Checkpoints that its ranks may not remove, as `<generation>:<step>`: the newest of each class of trust."""
    save_request = models.IntegerField(default=0)
    """Rises with each wish for a checkpoint now; its ranks save once for each number that they had not seen."""
    save_requested_at = models.FloatField(null=True)
    save_requested_by = models.CharField(max_length=150, blank=True)
    save_request_reason = models.CharField(max_length=400, blank=True)
    saves_failed = models.IntegerField(default=0)
    saves_skipped = models.IntegerField(default=0)
    last_good_paged_at = models.FloatField(null=True)
    """When a human was told that the last good checkpoint is too old; None once there is a newer one."""

    class Meta:
        ordering = ("-submitted_at",)

    def __str__(self) -> str:
        return self.name


class GenerationRow(models.Model):
    """One generation of a job: its frozen plan and the phase that is wanted of it."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="generations")
    number = models.IntegerField()
    plan_id = models.CharField(max_length=40)
    plan = models.JSONField()
    wanted = models.CharField(max_length=10)
    master_port = models.IntegerField(null=True)
    created_at = models.FloatField()
    run_ordered_at = models.FloatField(null=True)
    stop_ordered_at = models.FloatField(null=True)
    fenced_at = models.FloatField(null=True)
    """When the last of its nodes was proven empty."""
    broken_continuity = models.BooleanField(default=False)
    lease = models.JSONField(null=True)
    """Terms of the lease that hold now; they only rise. Null: its runners keep none."""
    adopted = models.BooleanField(default=False)
    """Not ordered by this database but found running: its backup is older than the generation."""

    class Meta:
        ordering = ("job", "number")
        constraints = (models.UniqueConstraint(fields=("job", "number"), name="one_row_per_generation"),)


class ShareRow(models.Model):
    """One generation on one node: what its agent reports."""

    generation = models.ForeignKey(GenerationRow, on_delete=models.CASCADE, related_name="shares")
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="shares")
    node_rank = models.IntegerField()
    seen = models.CharField(max_length=20, blank=True)
    reason = models.CharField(max_length=60, blank=True)
    detail = models.TextField(blank=True)
    master_port = models.IntegerField(null=True)
    fingerprint = models.CharField(max_length=80, blank=True)
    fingerprint_parts = models.JSONField(default=dict)
    proof = models.JSONField(null=True)
    reported_at = models.FloatField(null=True)
    boot_id = models.CharField(max_length=200, blank=True)
    """Boot of the node in which it was last reported."""
    keeps_lease = models.BooleanField(default=False)
    confirmed_at = models.FloatField(null=True)
    """When the node's own agent proved the stop; until then it goes on being told, whatever else is known."""

    class Meta:
        ordering = ("generation", "node_rank")
        constraints = (models.UniqueConstraint(fields=("generation", "node"), name="one_share_per_node"),)


class RankRow(models.Model):
    """One rank of one generation."""

    generation = models.ForeignKey(GenerationRow, on_delete=models.CASCADE, related_name="ranks")
    rank = models.IntegerField()
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="+")
    pid = models.IntegerField(null=True)
    started_at = models.FloatField(null=True)
    resumed_at = models.FloatField(null=True)
    resumed_step = models.IntegerField(null=True)
    saved_digest = models.JSONField(default=dict)
    live_digest = models.JSONField(default=dict)
    deterministic = models.BooleanField(default=False)
    first_step_at = models.FloatField(null=True)
    last_step = models.IntegerField(null=True)
    finished_step = models.IntegerField(null=True)
    phase = models.CharField(max_length=20, blank=True)
    phase_at = models.FloatField(null=True)
    progress_at = models.FloatField(null=True)
    """When it last finished a step or began another phase, by its agent's word."""
    progress_seen_at = models.FloatField(null=True)
    """When the server took the newest word of progress; no clock but its own is trusted to call a rank stalled."""
    pace_s = models.FloatField(null=True)
    """Longest of its recent steps."""
    exited_at = models.FloatField(null=True)
    exit_recorded_at = models.FloatField(null=True)
    """When the server took the word of it: an agent's clock may be wrong, and leases count from here."""
    exit_code = models.IntegerField(null=True)
    signal = models.IntegerField(null=True)
    detail = models.TextField(blank=True)
    nonfinite_since = models.IntegerField(null=True)
    """First step of its present run of losses that are not finite."""
    nonfinite_count = models.IntegerField(default=0)
    nonfinite_at = models.FloatField(null=True)

    class Meta:
        ordering = ("generation", "rank")
        constraints = (models.UniqueConstraint(fields=("generation", "rank"), name="one_row_per_rank"),)


class CheckpointRow(models.Model):
    """A complete checkpoint, as the ranks that wrote it reported it; the manifest on disk is the truth."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="checkpoints")
    generation_number = models.IntegerField()
    step = models.IntegerField()
    directory = models.TextField()
    size_bytes = models.BigIntegerField()
    world_size = models.IntegerField()
    parent_generation = models.IntegerField(null=True)
    parent_step = models.IntegerField(null=True)
    saved_at = models.FloatField()
    save_time_s = models.FloatField(null=True)
    after_fence = models.BooleanField(default=False)
    """Written by a generation that was fenced already: never resumed from."""
    blocked_s = models.FloatField(null=True)
    """How long training stood still for it; None where the whole save did."""
    integrity = models.CharField(max_length=20, default="complete")
    """Of `recovery.domain.trust`, like `health`; both are kept with the sentence that says how it is known."""
    integrity_at = models.FloatField(null=True)
    integrity_reason = models.TextField(blank=True)
    health = models.CharField(max_length=20, default="unknown")
    health_at = models.FloatField(null=True)
    health_reason = models.TextField(blank=True)
    """With health `unknown`: why the steps after it did not make it clean; empty while that is still open."""
    absolved_through = models.IntegerField(default=0)
    """An operator's word: what generations up to this one did after loading it says nothing against it."""

    class Meta:
        ordering = ("job", "generation_number", "step")
        constraints = (
            models.UniqueConstraint(fields=("job", "generation_number", "step"), name="one_row_per_checkpoint"),
        )


class SnapshotRow(models.Model):
    """One rank's part of a snapshot in one node's memory. Only the newest few of each rank and node are remembered."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="snapshots")
    node = models.ForeignKey("Node", on_delete=models.CASCADE, related_name="snapshots")
    generation_number = models.IntegerField()
    step = models.IntegerField()
    world_size = models.IntegerField()
    rank = models.IntegerField()
    boot_id = models.CharField(max_length=100)
    """Of the node when it told: its memory is lost with the boot."""
    kept_at = models.FloatField()

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=("job", "node", "generation_number", "step", "rank"), name="one_row_per_part_in_memory"
            ),
        )


class SaveTrouble(models.Model):
    """A save that failed, was left out, or was far slower than usual. Training went on."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="save_troubles")
    generation_number = models.IntegerField()
    rank = models.IntegerField()
    step = models.IntegerField()
    kind = models.CharField(max_length=20)
    """`failed`, `skipped` or `slow`."""
    attempt = models.IntegerField(default=1)
    reason = models.TextField(blank=True)
    at = models.FloatField()

    class Meta:
        ordering = ("-at", "-id")
        constraints = (
            models.UniqueConstraint(
                fields=("job", "generation_number", "rank", "step", "kind", "attempt"), name="one_row_per_trouble"
            ),
        )


class Stray(models.Model):
    """One node's share of a generation that this database does not know: its backup is older than the generation."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="strays")
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="strays")
    number = models.IntegerField()
    plan_id = models.CharField(max_length=200)
    phase = models.CharField(max_length=20)
    launch = models.JSONField(null=True)
    boot_id = models.CharField(max_length=200, blank=True)
    keeps_lease = models.BooleanField(default=False)
    first_reported_at = models.FloatField()
    reported_at = models.FloatField()

    class Meta:
        constraints = (models.UniqueConstraint(fields=("node", "job", "number"), name="one_stray_per_node"),)
