"""Starts the writer of this rank's node and connects to it; `Saver` does so once, and again when a writer has died."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from everstep.errors import SaveFailed
from everstep.ranks import Team

_GONE_WITHIN_S = 5.0


class Writer:
    """This rank's connection to the writer of its node, number `node` of `nodes`; leads: it started the writer."""

    def __init__(self, team: Team) -> None:
        """A collective. Raises `SaveFailed`, on this rank alone, where no writer could be started or reached."""
        self.process: subprocess.Popen[bytes] | None = None
        address, problem = "", ""
        # Ranks of one launcher are on one node and share its file system.
        place = (socket.gethostname(), os.getppid())
        places = team.gather(place)
        nodes = list(dict.fromkeys(places))
        self.nodes, self.node = len(nodes), nodes.index(place)
        self.leads = places.index(place) == team.rank
        directory: Path | None = None
        if self.leads:
            directory, problem = _new_directory()
        try:
            if directory is not None:
                address, problem = self._start(directory)
            addresses = team.gather((address, problem))
            address, problem = addresses[places.index(place)]
            if problem:
                raise SaveFailed(f"no process could be started that writes checkpoints: {problem}")
            self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.channel.connect(address)
            except OSError as err:
                raise SaveFailed(f"the process that writes checkpoints cannot be reached: {err}") from err
            self.channel.setblocking(False)
        finally:
            team.gather(None)  # all have connected: the address is not needed any more
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)

    def _start(self, directory: Path) -> tuple[str, str]:
        """(address, "") or ("", what went wrong)."""
        address = directory / "s"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(str(address))
                listener.listen(64)
                self.process = subprocess.Popen(
                    [
                        *[sys.executable, "-m", "everstep.checkpoint.writer_process"],
                        *[str(listener.fileno()), str(os.getpid())],
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                )
        except Exception as err:  # whatever it is, other ranks wait for this one's word
            return "", f"{type(err).__name__}: {err}"
        return str(address), ""

    def close(self) -> None:
        """Let go of it; the writer ends with the last rank of its node."""
        with contextlib.suppress(OSError):  # it is gone already
            # Not close() alone: workers of a DataLoader that were forked meanwhile hold the descriptor too.
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=_GONE_WITHIN_S)


def _new_directory() -> tuple[Path | None, str]:
    """(directory, "") or (None, what went wrong): other ranks wait for this one's word."""
    try:
        return Path(tempfile.mkdtemp(prefix="everstep-writer-")), ""
    except OSError as err:
        return None, f"{type(err).__name__}: {err}"
