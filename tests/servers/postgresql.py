"""A PostgreSQL of the tests' own: on a Unix socket in a temporary folder, without care for power cuts."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

_LIMIT_S = 60.0
_FAST = "-c fsync=off -c synchronous_commit=off -c full_page_writes=off"


class Postgresql:
    """One server. It refuses to run as root, so that root lends it to Debian's account for it."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` must not exist yet and has a short path, since the socket lies in it."""
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-pg-")) if folder is None else folder
        self.folder.mkdir(exist_ok=True, mode=0o700)
        self._become = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
        if self._become:
            shutil.chown(self.folder, "postgres")
        self._data = self.folder / "data"

    def __enter__(self) -> Postgresql:
        self._run("initdb", "-A", "trust", "-U", "postgres", "--no-sync", "--locale=C.UTF-8", "-E", "UTF8")
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """As `EVERSTEP_DATABASE_URL` takes it."""
        return database_url(self.folder)

    def start(self) -> None:
        log, options = self.folder / "log", f"-k {self.folder} -c listen_addresses= {_FAST}"
        self._run("pg_ctl", "-l", str(log), "-w", "-o", options, "start")

    def stop(self) -> None:
        """At once, with every connection cut; what was committed is there again after a start."""
        self._run("pg_ctl", "-m", "immediate", "-w", "stop")

    def _run(self, name: str, *arguments: str) -> None:
        argv: Sequence[str] = [*self._become, program(name), "-D", str(self._data), *arguments]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S, cwd="/")


def database_url(folder: Path) -> str:
    """The address of a server whose socket lies in `folder`."""
    return f"postgresql://postgres@{quote(str(folder), safe='')}/postgres"


def program(name: str) -> str:
    """A server program from Debian's folder of versions, or from PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else str(shutil.which(name))
