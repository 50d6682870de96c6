"""The server's settings with a home folder of the test run's own: tests never touch a real one."""

import atexit
import os
import shutil
import tempfile

_home = tempfile.mkdtemp(prefix="everstep-tests-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)
os.environ["EVERSTEP_HOME"] = _home

from dashboard.settings import *  # noqa: E402, F403

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # fast; nothing here is worth guessing
