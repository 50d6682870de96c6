"""Named places at which a test may have this process killed. Inactive unless EVERSTEP_FAILPOINTS names a folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from django.conf import settings


def hit(name: str) -> None:
    """Die here by SIGKILL if a file of this name is armed; the file is removed first, so that it happens once."""
    folder = settings.EVERSTEP_FAILPOINTS
    if not folder:
        return
    try:
        (Path(folder) / name).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
