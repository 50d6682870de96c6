"""Reads what the ledger of samples needs: one record per step of a job's line, aggregated by the database.

`store.situations` asks when a recovery is at its end, `queries.samples` when somebody looks at a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from django.db.models import Count, F, Max, Min, Q

from recovery.domain.generations import GenerationView
from recovery.domain.sample_ledger import LinePart, SampleLedger, StepSamples, audit_samples, line_to
from recovery.models import Job, StepRow


def load_ledger(job: Job, generations: Sequence[GenerationView], *, generation: int) -> SampleLedger:
    """The ledger of the line that ends in `generation`. Reads one aggregated row per step of the line."""
    parts = line_to(generation, generations)
    world_sizes = {one.number: one.plan.world_size for one in generations}
    on_line = {part.generation: part for part in parts}
    lost = [
        record
        for one in generations
        if one.number < generation and one.sound
        for record in _lost(job, one, on_line.get(one.number))
    ]
    replayed = {record.step for record in lost}
    digests = _digests(job, parts, replayed, world_sizes)
    line = (
        replace(record, digest=digests.get((part.generation, record.step))) if record.step in replayed else record
        for part in parts
        for record in _records(job, part.generation, _within(part))
    )
    return audit_samples(line, lost=lost)


def _lost(job: Job, generation: GenerationView, part: LinePart | None) -> list[StepSamples]:
    """What a generation did beyond its part of the line; all of it, if it has none."""
    beyond = Q() if part is None else Q(step__gt=part.upto_step)
    found = list(_records(job, generation.number, beyond))
    sums = _sums(job, generation.number, {record.step for record in found}, generation.plan.world_size)
    return [replace(record, digest=sums.get(record.step)) for record in found]


def _within(part: LinePart) -> Q:
    upto = Q() if part.upto_step is None else Q(step__lte=part.upto_step)
    return Q(step__gt=part.after_step) & upto


def _records(job: Job, generation: int, steps: Q) -> Iterator[StepSamples]:
    compared = ~Q(order_digest="") & ~Q(indices_digest="")
    rows = (
        StepRow.objects.filter(steps, job=job, generation_number=generation)
        .order_by("step")
        .values("step")
        .annotate(
            first_epoch=Min("epoch", filter=Q(span_start__isnull=False)),
            last_epoch=Max("epoch", filter=Q(span_start__isnull=False)),
            first_start=Min("span_start"),
            last_start=Max("span_start"),
            first_stop=Min("span_stop"),
            last_stop=Max("span_stop"),
            size=Max("epoch_size"),
            checked=Count("pk", filter=compared),
            wrong=Count("pk", filter=compared & ~Q(indices_digest=F("order_digest"))),
        )
    )
    for row in rows.iterator():
        yield StepSamples(
            generation=generation,
            step=row["step"],
            epoch=row["first_epoch"] or 0,
            start=row["first_start"],
            stop=row["first_stop"],
            epoch_size=row["size"],
            agree=(row["first_epoch"], row["first_start"], row["first_stop"])
            == (row["last_epoch"], row["last_start"], row["last_stop"]),
            wrong_ranks=row["wrong"],
            checked_ranks=row["checked"],
        )


def _digests(
    job: Job, parts: Sequence[LinePart], steps: set[int], world_sizes: dict[int, int]
) -> dict[tuple[int, int], str]:
    """(generation, step) -> checksum of the global batch, for those steps of the line that were made before."""
    return {
        (part.generation, step): digest
        for part in parts
        for step, digest in _sums(
            job, part.generation, {step for step in steps if part.holds(step)}, world_sizes.get(part.generation, 0)
        ).items()
    }


def _sums(job: Job, generation: int, steps: set[int], world_size: int) -> dict[int, str]:
    """Step -> the sum of all ranks' checksums, which does not depend on the world size; only where all are known."""
    if not steps:
        return {}
    found: dict[int, list[int]] = {}
    rows = StepRow.objects.filter(job=job, generation_number=generation, step__gte=min(steps), step__lte=max(steps))
    for step, digest in rows.exclude(indices_digest="").values_list("step", "indices_digest"):
        if step in steps:
            found.setdefault(step, []).append(int(digest, 16))
    return {step: f"{sum(ranks) % 2**64:016x}" for step, ranks in found.items() if len(ranks) == world_size}
