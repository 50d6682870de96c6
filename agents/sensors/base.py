"""What every GPU sensor offers to the daemon, whether its GPUs are real or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agents.protocol.messages import GpuSample


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """What is known of the node's GPUs as a whole."""

    count: int = 0
    model: str = ""
    driver: str = ""
    simulated: bool = False


class GpuSensor(Protocol):
    """One way to look at the GPUs of this node."""

    async def start(self) -> GpuFacts:
        """Begin, and say what there is; returns within a few seconds even if the driver hangs."""

    @property
    def facts(self) -> GpuFacts:
        """What is known by now; a driver that came up late changes it."""

    async def sample(self) -> list[GpuSample]:
        """One sample per known GPU, in less than a second. Values that cannot be read are None, with the problem."""

    async def close(self) -> None:
        """End; returns within a few seconds."""
