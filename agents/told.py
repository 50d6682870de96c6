"""What the server has been told of each generation here: so that a restarted agent goes on, and repeats nothing.

It follows from the durable messages alone, and the outbox keeps it on disk together with them. What was told is either
with the server or still in the outbox, or its loss was told in its place.
"""

from __future__ import annotations

import copy

import msgspec

from agents.protocol.messages import (
    CheckpointRehashed,
    CheckpointSaved,
    Message,
    ProbeReport,
    RankExited,
    RankFinished,
    RankPhase,
    RankResumed,
    RankStarted,
    SaveInTrouble,
    StepReports,
)

_GENERATIONS_KEPT = 200
_PROBES_KEPT = 500
_SAVE_NOTES_KEPT = 100


class ToldGeneration(msgspec.Struct):
    """What was told of one generation's ranks on this node, by rank."""

    started: dict[int, int] = {}
    """Process ids."""
    resumed: dict[int, int] = {}
    """Steps that were done already."""
    step: dict[int, int] = {}
    """The newest one."""
    saved: int | None = None
    """The newest checkpoint; None if none was told, since step 0 is one too."""
    save_notes: list[str] = []
    """The newest words on saves beside their success, by `note_key`."""
    phase: dict[int, float] = {}
    """When the newest one began."""
    finished: dict[int, int] = {}
    exited: set[int] = set()


class Told(msgspec.Struct):
    """All that was told, of the generations that were spoken of last."""

    generations: dict[str, ToldGeneration] = {}
    probes: dict[str, float] = {}

    def of(self, job: str, generation: int) -> ToldGeneration:
        """A copy of what was told of one generation."""
        return copy.deepcopy(self.generations.get(_key(job, generation), ToldGeneration()))

    def take(self, message: Message) -> None:
        """A message is on its way: it counts as told."""
        match message:
            case ProbeReport(probe=probe, at=at):
                self.probes[probe] = at
                while len(self.probes) > _PROBES_KEPT:
                    del self.probes[next(iter(self.probes))]
            case StepReports(job=job, generation=generation):
                told = self._generation(job, generation)
                for said in message.steps:
                    told.step[said.rank] = max(said.step, told.step.get(said.rank, 0))
            case RankStarted(job=job, generation=generation):
                self._generation(job, generation).started[message.rank] = message.pid
            case RankResumed(job=job, generation=generation):
                self._generation(job, generation).resumed[message.rank] = message.step
            case RankPhase(job=job, generation=generation):
                self._generation(job, generation).phase[message.rank] = message.at
            case CheckpointSaved(job=job, generation=generation):
                told = self._generation(job, generation)
                told.saved = message.step if told.saved is None else max(told.saved, message.step)
            case CheckpointRehashed(job=job, generation=generation) | SaveInTrouble(job=job, generation=generation):
                notes = self._generation(job, generation).save_notes
                if note_key(message) not in notes:
                    notes.append(note_key(message))
                    del notes[:-_SAVE_NOTES_KEPT]
            case RankFinished(job=job, generation=generation):
                self._generation(job, generation).finished[message.rank] = message.step
            case RankExited(job=job, generation=generation):
                self._generation(job, generation).exited.add(message.rank)

    def _generation(self, job: str, generation: int) -> ToldGeneration:
        """The generation's own, which counts as spoken of last from now on."""
        told = self.generations.pop(_key(job, generation), None) or ToldGeneration()
        self.generations[_key(job, generation)] = told
        while len(self.generations) > _GENERATIONS_KEPT:
            del self.generations[next(iter(self.generations))]
        return told


def note_key(note: CheckpointRehashed | SaveInTrouble) -> str:
    """Tells one word on a save from all others of its generation."""
    if isinstance(note, CheckpointRehashed):
        return f"rehashed:{note.rank}:{note.step}:{note.ok}"
    return f"{note.kind.value}:{note.rank}:{note.step}:{note.attempt}"


def _key(job: str, generation: int) -> str:
    return f"{generation}:{job}"
