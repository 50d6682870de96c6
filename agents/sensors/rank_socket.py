"""The local door for ranks and runners: a Unix datagram socket, read at once, every datagram checked and counted.

The daemon opens it; the supervisor decides by (job, generation) who may speak. Senders never wait: what does not fit
the kernel's queue (often 10 datagrams) they send later, or it is made good from the rank's own log.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from agents.errors import StateUnusable
from agents.log_lines import NodeLog
from agents.sensors.rank_reports import MAX_REPORT_BYTES, Said, parse_report

log = NodeLog(__name__)

_LONGEST_PATH_BYTES = 100
"""The kernel's limit is 108 with the final zero."""
_BATCH = 256
_CREDENTIALS = struct.Struct("iII")
_CREDENTIALS_SPACE = socket.CMSG_SPACE(_CREDENTIALS.size)
_TELL_DROPPED_EVERY_S = 30.0


def socket_path(state_directory: Path) -> Path:
    """Where ranks find the agent: in the state directory, or under a short name made from it if that is too long.

    The same directory always gives the same path, so that ranks find a restarted agent.
    """
    path = state_directory / "ranks.sock"
    if len(os.fsencode(path)) <= _LONGEST_PATH_BYTES:
        return path
    short = hashlib.sha256(os.fsencode(state_directory)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"everstep-{os.geteuid()}-{short}" / "ranks.sock"


class RankSocket:
    """Receives datagrams and hands each valid one to `take`, which says whether the sender may say that.

    `take` also gets the sender's user id, by the kernel's word.
    """

    def __init__(self, path: Path, *, take: Callable[[Said, int], bool]) -> None:
        self.path = path
        self.dropped = 0
        """Datagrams that were malformed or came from ranks that are none of this agent's."""
        self._take = take
        self._told_dropped = 0
        self._told_at = 0.0
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Bind and begin to read. Raises `StateUnusable`."""
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            _own_directory(self.path.parent)
            self.path.unlink(missing_ok=True)
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            receiver.bind(str(self.path))
            self.path.chmod(0o666)  # ranks may run as other users; who speaks, and what, is checked
            receiver.setblocking(False)
        except OSError as err:
            receiver.close()
            raise StateUnusable(f"The ranks' socket {self.path} could not be opened ({err}).") from err
        self._socket = receiver
        asyncio.get_running_loop().add_reader(receiver.fileno(), self._read, _BATCH)

    def drain(self) -> None:
        """Read what has already arrived: whatever a rank said before it died is taken before its death is told."""
        if self._socket is not None:
            self._read(limit=1 << 16)

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _read(self, limit: int) -> None:
        assert self._socket is not None
        for _ in range(limit):
            try:
                raw, ancillary, flags, _ = self._socket.recvmsg(MAX_REPORT_BYTES, _CREDENTIALS_SPACE)
            except BlockingIOError:
                break
            said = None if flags & socket.MSG_TRUNC else parse_report(raw)
            if said is None or not self._take(said, _sender(ancillary)):
                self.dropped += 1
        if self.dropped > self._told_dropped and time.monotonic() - self._told_at > _TELL_DROPPED_EVERY_S:
            log.warning("datagrams were dropped: malformed, or from ranks that do not run here", total=self.dropped)
            self._told_dropped, self._told_at = self.dropped, time.monotonic()


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int:
    """User id of the sender, -1 if the kernel did not say (unix(7), SCM_CREDENTIALS: pid, uid, gid)."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1])
    return -1


def _own_directory(directory: Path) -> None:
    """Make sure that nobody else can put a socket of his own in the place. Raises `OSError`."""
    directory.mkdir(mode=0o711, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{directory} is not a directory that only the agent's account may change")
