"""Asks whoever supervises this server to hold its processes down for a while: the fault of the drill `server-down`.

The supervisor is another program (`everstep up`): a file in the home folder is all that it and this server share.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from django.conf import settings

ROLES = ("web", "worker", "beat")
_HOLD_FILE = "hold.json"
_MARKER_FILE = "supervised"


def is_supervised() -> bool:
    """Whether a supervisor lives that would start this server again. It leaves its process id in the home folder."""
    try:
        pid = int((_home() / _MARKER_FILE).read_text())
        os.kill(pid, 0)
    except PermissionError:
        return True  # it lives, under another account
    except (OSError, ValueError):
        return False
    return pid > 0


def hold_server(*, drill: str, until: float, by: str) -> None:
    """Ask for web, worker and beat to be killed and kept down until a Unix time. Raises `OSError`.

    This process may be dead a moment later.
    """
    path = _home() / _HOLD_FILE
    aside = path.with_suffix(f".{os.getpid()}")
    with aside.open("w") as file:
        json.dump({"drill": drill, "roles": ROLES, "until": until, "by": by}, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _home() -> Path:
    return Path(settings.EVERSTEP_HOME)
