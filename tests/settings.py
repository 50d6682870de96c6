"""The server's settings with a home folder of the test run's own: tests never touch a real one.

EVERSTEP_TEST_SERVERS chooses what stands behind: `embedded` (SQLite and Valkey, the default) or `production`
(PostgreSQL and Debian's Redis). `tests/conftest.py` starts the servers when a test first asks for one.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from tests.servers.postgresql import database_url

SERVERS = os.environ.get("EVERSTEP_TEST_SERVERS", "embedded")
if SERVERS not in ("embedded", "production"):
    raise ValueError(f"EVERSTEP_TEST_SERVERS must be embedded or production, not {SERVERS!r}.")

_home = tempfile.mkdtemp(prefix="everstep-tests-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)
os.environ["EVERSTEP_HOME"] = _home
os.environ.pop("EVERSTEP_REDIS_URL", None)
os.environ.pop("EVERSTEP_DATABASE_URL", None)
POSTGRESQL_FOLDER: Path | None = None
if SERVERS == "production":
    POSTGRESQL_FOLDER = Path(tempfile.mkdtemp(prefix="everstep-pg-"))  # not in the home: another account runs it
    os.environ["EVERSTEP_DATABASE_URL"] = database_url(POSTGRESQL_FOLDER)

from dashboard.settings import *  # noqa: E402, F403

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # fast; nothing here is worth guessing
