"""The agent's part in the lease of one run: three files in the run's directory, which runner and ranks read.

`contact` (8 bytes) holds when this node last spoke with the server, `progress` (16 bytes per rank) what the ranks say
of themselves, `lease.json` how long both may be silent. Times are CLOCK_BOOTTIME in nanoseconds. The runner judges by
them and kills its ranks; the agent may be what died.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from pathlib import Path

from agents.boot_clock import boottime_ns
from agents.policy import Account
from agents.protocol.messages import LeaseTerms
from agents.supervisor.owned_files import create_file, open_directory, replace_file

_CONTACT = struct.Struct("<Q")
_PROGRESS_BYTES = 16
"""Per rank: u64 time of its last progress, u32 phase, u32 finished steps."""


class LeaseFiles:
    """Where the files are; the directory belongs to the account of the ranks."""

    def __init__(self, directory: Path) -> None:
        self.contact = directory / "contact"
        self.progress = directory / "progress"
        self.terms = directory / "lease.json"


class Lease:
    """The lease of one run that is alive, with its files open."""

    def __init__(self, *, directory: int, contact: int, terms: LeaseTerms, contact_ns: int) -> None:
        self.terms = terms
        self._directory = directory
        self._contact = contact
        self._contact_ns = contact_ns

    @classmethod
    def create(cls, directory: Path, *, account: Account, ranks: int, terms: LeaseTerms, contact_ns: int) -> Lease:
        """Make the files of a run that is about to start. Raises `OSError`."""
        files = LeaseFiles(directory)
        place = open_directory(directory)
        try:
            progress = create_file(files.progress.name, place, bytes(_PROGRESS_BYTES * ranks), account.uid, account.gid)
            os.close(progress)
            os.close(create_file(files.terms.name, place, _encoded(terms), account.uid, account.gid))
            contact = create_file(files.contact.name, place, _CONTACT.pack(contact_ns), account.uid, account.gid)
        except OSError:
            os.close(place)
            raise
        return cls(directory=place, contact=contact, terms=terms, contact_ns=contact_ns)

    @classmethod
    def open(cls, directory: Path, *, uid: int, terms: LeaseTerms) -> Lease:
        """Find the files of a run again; `terms` is what the agent's own record says. Raises `OSError`.

        The job may have put anything into its directory, and the agent may be root: neither a link nor anything else
        than a plain file of the job's own is opened.
        """
        place = open_directory(directory)
        try:
            name = LeaseFiles(directory).contact.name
            contact = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
        except OSError:
            os.close(place)
            raise
        found = os.fstat(contact)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != uid or found.st_nlink != 1:
            os.close(contact)
            os.close(place)
            raise PermissionError(f"{directory / name} is no plain file of user {uid}")
        return cls(directory=place, contact=contact, terms=terms, contact_ns=_read_contact(contact))

    def note_contact(self, sent_ns: int) -> None:
        """The server has written down that it heard what was sent at `sent_ns`; never lowers. Raises `OSError`."""
        if sent_ns > self._contact_ns:
            os.pwrite(self._contact, _CONTACT.pack(sent_ns), 0)
            self._contact_ns = sent_ns

    def raise_terms(self, wanted: LeaseTerms) -> bool:
        """Take over what is longer; False if nothing is. Raises `OSError`, and nothing has changed then."""
        terms = longest_terms(self.terms, wanted)
        if terms == self.terms:
            return False
        replace_file("lease.json", self._directory, _encoded(terms))
        self.terms = terms
        return True

    def close(self) -> None:
        os.close(self._contact)
        os.close(self._directory)


def longest_terms(one: LeaseTerms, other: LeaseTerms) -> LeaseTerms:
    """The longer limit for each phase: within a generation terms only rise."""
    return LeaseTerms(**{name: max(getattr(one, name), getattr(other, name)) for name in LeaseTerms.__struct_fields__})


def _encoded(terms: LeaseTerms) -> bytes:
    return json.dumps({name: getattr(terms, name) for name in LeaseTerms.__struct_fields__}).encode()


def _read_contact(descriptor: int) -> int:
    """What stands there; 0 if that is not a time of the past, since the job may have written it."""
    raw = os.pread(descriptor, _CONTACT.size, 0)
    noted = int(_CONTACT.unpack(raw)[0]) if len(raw) == _CONTACT.size else 0
    return noted if noted <= boottime_ns() else 0
