"""What this machine is: read once at start for the hello, and again after each reconnect."""

from __future__ import annotations

import os
import socket

from agents.protocol.messages import NodeFacts
from agents.sensors.base import GpuFacts
from agents.settings import Settings


def node_facts(settings: Settings, gpus: GpuFacts) -> NodeFacts:
    return NodeFacts(
        hostname=socket.gethostname(),
        address=settings.address,
        rack=settings.rack,
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu_count=gpus.count,
        gpu_model=gpus.model,
        simulated_gpus=gpus.simulated,
        slots=slots(settings, gpus),
        probe_port=settings.probe_port,
    )


def slots(settings: Settings, gpus: GpuFacts) -> int:
    """Ranks that this node takes at once."""
    return settings.slots if settings.slots is not None else max(1, gpus.count)
