"""The files of one node's lease, as the runner and its ranks read and write them. Standard library only.

Agent, runner and ranks share them in the run's directory, so that each can die without taking the lease with it:

    contact     8 bytes: when the newest heartbeat was sent that the server has answered; the agent writes it
    progress    16 bytes per rank of this node: `Progress`; each rank writes its own slot
    lease.json  `Terms`; the agent replaces it when they rise
    kept        16 bytes: `Held`, the runner's last judgement; ranks read it

`kept` is a rank's memory of what it could not watch while it was in a step: contact that was there all along. Numbers
are little-endian. Files and not mapped memory: a write to a mapping whose file was cut short would kill training.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.elastic.lease import Held, Progress, Terms
from everstep.errors import LeaseUnusable

KEPT_FILE = "kept"
LEASE_VARIABLES = ("EVERSTEP_CONTACT", "EVERSTEP_PROGRESS", "EVERSTEP_LEASE")
"""What a rank's environment says of its lease: paths of the files that the agent has made, in this order."""
_CONTACT = struct.Struct("<Q")
_SLOT = struct.Struct("<QII")
_KEPT = struct.Struct("<QQ")


@dataclass(frozen=True, kw_only=True)
class LeasePaths:
    """Where the agent has put a lease. The runner's own file lies beside the terms."""

    contact: Path
    progress: Path
    terms: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LeasePaths | None:
        """What the runner told its rank; None where there is no lease to keep."""
        given = [environment.get(name) for name in LEASE_VARIABLES]
        if not any(given):
            return None
        if not all(given):
            raise LeaseUnusable(f"{', '.join(LEASE_VARIABLES)} name one lease: set all of them, or none.")
        contact, progress, terms = (Path(path or "") for path in given)
        return cls(contact=contact, progress=progress, terms=terms)

    def as_environment(self) -> dict[str, str]:
        """For the ranks; read by `from_environment`."""
        return dict(zip(LEASE_VARIABLES, map(str, (self.contact, self.progress, self.terms)), strict=True))

    @property
    def kept(self) -> Path:
        return self.terms.with_name(KEPT_FILE)


class LeaseFiles:
    """A lease's files, opened once: by the runner, and by each rank."""

    def __init__(self, paths: LeasePaths) -> None:
        """Raises `LeaseUnusable`: training that cannot keep the lease on which the server counts must not start."""
        self._terms_path = paths.terms
        self._terms_version: tuple[int, int, int] | None = None
        try:
            self._contact = os.open(paths.contact, os.O_RDONLY | os.O_CLOEXEC)
            self._progress = os.open(paths.progress, os.O_RDWR | os.O_CLOEXEC)
            self._kept = os.open(paths.kept, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._ranks = [Progress(0, 0, 0)] * (os.fstat(self._progress).st_size // _SLOT.size)
            self.terms = self._read_terms()
        except (OSError, ValueError) as err:
            raise LeaseUnusable(
                f"The lease in {paths.terms.parent} cannot be kept ({type(err).__name__}: {err}). "
                "The node's agent makes its files before it starts a runner: see its log."
            ) from err

    def contact_ns(self) -> int:
        """The newest contact; 0 if there was none."""
        content = _read(self._contact, _CONTACT.size)
        return int(_CONTACT.unpack(content)[0]) if content else 0

    def ranks(self) -> list[Progress]:
        """Each slot, by local rank; zeros for a rank that has not begun."""
        if content := _read(self._progress, len(self._ranks) * _SLOT.size):
            self._ranks = [Progress(*slot) for slot in _SLOT.iter_unpack(content)]
        return self._ranks

    def write_progress(self, local_rank: int, progress: Progress) -> None:
        """A disk that refuses it must not stop training: the rank then looks silent, which contact makes good."""
        try:
            os.pwrite(self._progress, _SLOT.pack(*progress), local_rank * _SLOT.size)
        except OSError:
            return

    def kept(self) -> Held | None:
        """The runner's last judgement; None before its first."""
        content = _read(self._kept, _KEPT.size)
        return Held(*_KEPT.unpack(content)) if content else None

    def write_kept(self, held: Held) -> None:
        """A disk that refuses it leaves ranks with what they have seen themselves."""
        with contextlib.suppress(OSError):
            os.pwrite(self._kept, _KEPT.pack(*held), 0)

    def take_raised_terms(self) -> bool:
        """Read the terms again if their file was replaced; True when they have risen. An unreadable file is left."""
        before = self.terms
        with contextlib.suppress(OSError, ValueError):
            self.terms = before.raised_to(self._read_terms())
        return self.terms != before

    def _read_terms(self) -> Terms:
        found = self._terms_path.stat()
        version = (found.st_ino, found.st_mtime_ns, found.st_size)
        if version == self._terms_version:
            return self.terms
        terms = Terms.parse(self._terms_path.read_bytes())
        self._terms_version = version
        return terms


def boottime_ns() -> int:
    """Now, on the clock of the lease."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _read(fd: int, size_bytes: int) -> bytes:
    """The first bytes of a file; nothing if they are not all there or cannot be read: no news."""
    try:
        content = os.pread(fd, size_bytes, 0)
    except OSError:
        return b""
    return content if len(content) == size_bytes else b""
