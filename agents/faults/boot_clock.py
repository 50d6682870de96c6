"""The clock of all faults on a node: nanoseconds since boot, suspends counted, whatever the wall clock is set to.

A moment on it means nothing after a reboot, so it is always kept with the boot it belongs to. Stdlib only, since the
keeper uses it.
"""

from __future__ import annotations

import time
from pathlib import Path

SECOND_NS = 1_000_000_000
LONGEST_FAULT_S = 600.0
"""No fault lasts longer than this, whatever a server or a damaged file asks for."""


def boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def this_boot() -> str:
    """Changes with each boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
