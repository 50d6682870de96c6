"""`events.jsonl`: what a runner tells its agent. Appended line by line; a poke says that there is something new.

The file is the truth and outlives both; the poke only saves the agent from waiting for its next look. Neither the agent
nor the disk may stop training: what a full disk refuses is kept, and written before the next event.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from everstep.telemetry import Telemetry

EVENTS_FILE = "events.jsonl"


class Journal:
    """Appends events of one runner; safe to use from its threads."""

    def __init__(self, directory: Path, telemetry: Telemetry) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(directory / EVENTS_FILE, flags, 0o600)
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._waiting = b""

    def write(self, kind: str, **fields: Any) -> None:
        """One event, in the kernel's hands when this returns, if it takes it. `at` is Unix seconds."""
        line = json.dumps({"kind": kind, "at": time.time(), **fields}).encode() + b"\n"
        with self._lock:
            self._waiting += line
            with contextlib.suppress(OSError):
                self._waiting = self._waiting[os.write(self._fd, self._waiting) :]
            self._telemetry.send("poke")
