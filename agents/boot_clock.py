"""The clock of leases and faults on a node: nanoseconds since boot, suspends counted, whatever the wall clock says.

A moment on it means nothing after a reboot, so what outlives the agent keeps it with the boot it belongs to. Link,
supervisor and drills use it. Stdlib only, since the keeper of a drill does, too.
"""

from __future__ import annotations

import time
from pathlib import Path

SECOND_NS = 1_000_000_000


def boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def this_boot() -> str:
    """Changes with each boot of the kernel: after a reboot nothing of an old generation can be alive."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
