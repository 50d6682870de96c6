"""Runs planted and clean resumes, and says of each whether verification found it. The proof calls, and its slice."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planted_bugs.bugs import BUGS
from planted_bugs.training import Case, Plant, lose, resume
from planted_bugs.verdicts import judge_logs
from recovery.domain.continuity import VerdictKind

TWO_RANKS_EVERY = 5
"""Clean resumes have one rank, and each fifth has two: a rank more finds no other alarms, and takes twice as long."""


@dataclass(frozen=True)
class Mode:
    """What the script promises, and how noisy it is."""

    deterministic: bool = True
    noise: float = 0.0

    def __str__(self) -> str:
        promise = "equal bits promised" if self.deterministic else "nothing promised"
        return f"{promise}, noise {self.noise:g}" if self.noise else promise


MODES = [Mode(), Mode(False), Mode(False, 1e-4), Mode(False, 1e-3)]


@dataclass(frozen=True)
class Result:
    """`found`: the verdict was broken, and of a planted bug, its first sentence names it."""

    bug: str
    mode: Mode
    seed: int
    found: bool
    said: str


def planted_resumes(mode: Mode, *, seed: int, only: Sequence[str] = ()) -> Iterator[Result]:
    """Each bug on two ranks, from one lost generation."""
    case = Case(seed=seed, deterministic=mode.deterministic, noise=mode.noise)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        lost = Path(folder) / "lost"
        lose(case, lost)
        for number, (bug, kind) in enumerate(BUGS.items()):
            if (only and bug not in only) or (kind.exact_only and not mode.deterministic):
                continue
            root = Path(folder) / str(number)
            _copy(lost, root)
            resume(case, root, kind(case))
            outcome = judge_logs(case, root)
            found = outcome.alarm is not None and kind.words in outcome.said
            yield Result(bug, mode, seed, found, outcome.said)


def clean_resumes(modes: Sequence[Mode], *, seed: int, count: int) -> Iterator[Result]:
    """Jobs with seeds of their own, the modes in turn. Anything but the proof that was due is a false alarm."""
    for number in range(count):
        mode = modes[number % len(modes)]
        case = Case(
            seed=1000 * seed + number,
            world_size=1 if number % TWO_RANKS_EVERY else 2,
            deterministic=mode.deterministic,
            noise=mode.noise,
        )
        with tempfile.TemporaryDirectory(prefix="clean-") as folder:
            lose(case, Path(folder))
            resume(case, Path(folder), Plant(case))
            outcome = judge_logs(case, Path(folder))
        due = VerdictKind.BIT_EQUAL if mode.deterministic else VerdictKind.STATE_EQUAL
        alarmed = outcome.alarm is not None or outcome.last.kind is not due or not outcome.last.caught_up
        yield Result("", mode, case.seed, alarmed, outcome.said)


def _copy(lost: Path, root: Path) -> None:
    """The lost generation's logs, and its checkpoints by hard links: a resume changes none of them."""
    for path in lost.rglob("*"):
        target = root / path.relative_to(lost)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif path.suffix != ".err" and not path.name.startswith("store"):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(path)
