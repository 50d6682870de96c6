"""Storage that fails while a real run saves to it, and writers that die: training goes on, the last good one stays.

Where this process may mount, the storage is a small file system of its own that fills up or is made read-only;
elsewhere the writer's calls fail as they would there (`failing_medium`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agents.supervisor.checkpoints import is_complete
from corruptions.crew import Crew
from corruptions.judges import Result
from everstep.checkpoint.lineage import newest_checkpoint, record_lineage
from everstep.checkpoint.manifest import CheckpointName, complete_checkpoints
from everstep.checkpoint.verify import examine

GOOD, LOST, LATER = (CheckpointName(generation=1, step=step) for step in (1, 2, 3))
STORE_BYTES = 24 << 20


class Trial:
    """A crew that saves to a store of its own. A failure is made by `fail` and ended by `heal`."""

    def __init__(self, crew: Crew, folder: Path, rng: random.Random) -> None:
        self.crew = crew
        self.root = folder / "checkpoints"
        self.rng = rng
        self.survives_it = False
        """Whether the save is expected to come through after all."""
        self._healing: list[Callable[[], object]] = []
        self.root.mkdir()

    def call_fails(self, call: str, path: str, error: int, **more: Any) -> str:
        """A call of the writer on files of this name ends in this error from now on."""
        self.crew.fault.write_text(json.dumps({"call": call, "path": path, "errno": error, **more}))
        self.when_healed(self.crew.fault.unlink)
        return f"{errno.errorcode[error]} in {call} of {path} {more or ''}".rstrip()

    def killed(self, call: str, path: str, *, after: int = 0) -> str:
        """The writer is killed at such a call."""
        self.crew.fault.write_text(json.dumps({"call": call, "path": path, "kill": True, "after": after}))
        self.when_healed(self.crew.fault.unlink)
        return f"before {call} of {path}, the {after + 1}. time"

    def when_healed(self, step: Callable[[], object]) -> None:
        self._healing.append(step)

    def heal(self) -> None:
        while self._healing:
            self._healing.pop()()


def no_space(trial: Trial) -> str:
    """The store is full, but for less than a checkpoint needs."""
    if not os.path.ismount(trial.root):
        return no_space_at_some_write(trial)
    free = os.statvfs(trial.root)
    left = trial.rng.choice([0, 4096, 65536, 150_000])
    filler = trial.root / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(4096, free.f_bavail * free.f_frsize - left))
    trial.when_healed(filler.unlink)
    return f"tmpfs with {left} bytes free"


def no_space_at_some_write(trial: Trial) -> str:
    return trial.call_fails("write", "shard-|rank-", errno.ENOSPC, after=trial.rng.randrange(60))


def no_space_for_the_manifest(trial: Trial) -> str:
    return trial.call_fails("fsync", r"manifest\.json\.tmp$", errno.ENOSPC)


def write_error(trial: Trial) -> str:
    """Written to memory, and never to the medium: it shows when the file, or its directory, is synced."""
    path = trial.rng.choice(["shard-", "rank-", r"\.writing-[^/]*$", r"/step-\d+$", r"generation-\d+$", "manifest"])
    return trial.call_fails("fsync", path, errno.EIO)


def read_only(trial: Trial) -> str:
    if os.path.ismount(trial.root):
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["mount", "-o", "remount,ro", trial.root], check=True, capture_output=True)
            trial.when_healed(lambda: subprocess.run(["mount", "-o", "remount,rw", trial.root], check=True))
            return "tmpfs made read-only"
    return trial.call_fails("mkdir", "writing-", errno.EROFS)


def hiccup(trial: Trial) -> str:
    """It fails once or twice and comes back: trying again is enough."""
    trial.survives_it = True
    error = trial.rng.choice([errno.EIO, errno.ENOSPC, errno.ESTALE])
    return trial.call_fails("write", trial.rng.choice(["shard-", "rank-"]), error, times=trial.rng.choice([1, 2]))


def writer_killed(trial: Trial) -> str:
    if trial.rng.random() < 0.3:
        return trial.killed("fsync", trial.rng.choice(["shard-", "rank-"]))
    return trial.killed("write", "shard-|rank-", after=trial.rng.randrange(50))


def writer_killed_before_the_rename(trial: Trial) -> str:
    return trial.killed("rename", r"/step-\d+$")


def leader_killed_before_the_manifest(trial: Trial) -> str:
    return trial.killed("rename", r"manifest\.json$")


def judge_failing_save(kind: str, crew: Crew, folder: Path, rng: random.Random, fail: Callable[[Trial], str]) -> Result:
    """One failure in the middle of three saves."""
    trial = Trial(crew, folder, rng)
    with _small_store(trial.root):
        record_lineage(trial.root, GOOD.generation, parent=None)
        crew.ask("open", trial.root)
        try:
            bad, good, what = _three_saves(trial, fail)
        finally:
            trial.heal()
            crew.ask("close")
    return Result(kind=kind, shape=str(crew.shape), what=what, found=("save",), accepted_bad=bad, refused_good=good)


def _three_saves(trial: Trial, fail: Callable[[Trial], str]) -> tuple[str, str, str]:
    """(what was accepted that is bad, what was refused that is good, what was done)."""
    crew, root = trial.crew, trial.root
    answers = crew.ask("save", GOOD)
    truth = {GOOD: _truth(answers)}
    if f"saved {GOOD}" not in answers[0][1]:
        return "", f"told {answers[0][1]} of a save that nothing hinders", "nothing yet"
    what = fail(trial)
    answers = crew.ask("save", LOST)
    truth[LOST] = _truth(answers)
    told = [line for _, news, _ in answers for line in news]
    saved = f"saved {LOST}" in told
    if not trial.survives_it:
        if saved or not any(line.startswith(f"failed {LOST}") for line in told):
            return f"told {told} of a save that failed", "", what
        listed = [manifest.name for manifest in complete_checkpoints(root)]
        if listed != [GOOD] or is_complete(str(root), LOST.generation, LOST.step):
            return f"complete are {listed} after a failed save", "", what
    elif not saved:
        return "", f"told {told} of a save that trying again would have saved", what
    last_good = LOST if trial.survives_it else GOOD
    refused = _refused(trial, last_good, truth)
    trial.heal()
    answers = crew.ask("save", LATER)
    truth[LATER] = _truth(answers)
    if not refused and f"saved {LATER}" not in answers[0][1]:
        refused = f"told {[news for _, news, _ in answers]} of a save to storage that works again"
    refused = refused or _refused(trial, LATER, truth)
    left = sorted(path.name for path in root.glob("generation-*/.writing-*"))
    if not refused and left:
        refused = f"left {left} behind"
    return "", refused, what


def _refused(trial: Trial, name: CheckpointName, truth: dict[CheckpointName, list[str]]) -> str:
    """How a good checkpoint is not taken for what it is; "" if it is chosen, whole, and loaded as it was saved."""
    chosen = newest_checkpoint(trial.root)
    if chosen is None or chosen.name != name:
        return f"{chosen and chosen.name} is chosen instead of {name}"
    faults = examine(name.directory(trial.root)).faults
    if faults:
        return f"{name}: {faults[0]}"
    replies = trial.crew.ask("load", name.directory(trial.root))
    if [reply.said for reply in replies] != truth[name]:
        return f"{name} was loaded as {[reply.outcome for reply in replies]}, not as it was saved"
    return ""


def _truth(answers: list[tuple[str, list[str], bool]]) -> list[str]:
    return [print_ for print_, _, _ in answers]


@contextlib.contextmanager
def _small_store(root: Path) -> Iterator[None]:
    """A file system of its own, where this process may have one."""
    if os.geteuid():
        yield
        return
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={STORE_BYTES}", "corruptions", root], capture_output=True, check=False
    )
    try:
        yield
    finally:
        if not made.returncode:
            ctypes.CDLL(None).umount2(os.fsencode(root), 2)  # MNT_DETACH: a writer may still be at its last file
