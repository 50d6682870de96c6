"""The tests of rows once more on PostgreSQL: a server of our own on a Unix socket, the tests in their own process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

ROOT = Path(__file__).parents[2]
TESTS = (
    "test_recovery_pipeline.py", "test_agent_socket.py", "test_api_writes.py", "test_queries.py",
    "test_ingest_hard_facts.py", "test_engine_limits.py", "test_drill_marks.py", "test_agent_socket_trouble.py",
)  # fmt: skip


def program(name: str) -> str:
    """A server program from PATH or from Debian's folder of versions."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else str(shutil.which(name))


@pytest.fixture
def database_url() -> Iterator[str]:
    """A fresh server. It refuses to run as root, so that root lends it to Debian's account for it."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-pg-"))
    become = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    if become:
        shutil.chown(folder, "postgres")
    data, log = folder / "data", folder / "log"

    def run(*argv: str) -> None:
        subprocess.run([*become, *argv], check=True, stdout=subprocess.DEVNULL, timeout=60, cwd="/")

    run(program("initdb"), "-D", str(data), "-A", "trust", "-U", "postgres", "--no-sync")
    run(program("pg_ctl"), "-D", str(data), "-l", str(log), "-w", "-o", f"-k {folder} -c listen_addresses=", "start")
    try:
        yield f"postgresql://postgres@{quote(str(folder), safe='')}/postgres"
    finally:
        run(program("pg_ctl"), "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(300)
def test_rows_behave_the_same_on_postgresql(database_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/integration/{t}" for t in TESTS)],
        cwd=ROOT,
        env={**os.environ, "EVERSTEP_DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
