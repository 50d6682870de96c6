"""`Faults` with nothing around it: one run or none, a link that only remembers, messages into a list."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agents.faults.faults import Faults
from agents.faults.moment import DrilledRun
from agents.protocol.messages import Message
from agents.settings import Settings


@dataclass
class OneRun:
    """A supervisor that knows at most one generation."""

    found: DrilledRun | None

    def run(self, job: str, generation: int) -> DrilledRun | None:
        return self.found


@dataclass
class FakeLink:
    calls: list[str] = field(default_factory=list)

    def cut(self) -> None:
        self.calls.append("cut")

    def mend(self) -> None:
        self.calls.append("mend")


def drill_desk(
    directory: Path,
    run: DrilledRun | None,
    told: list[Message],
    *,
    link: FakeLink | None = None,
    server_now: Callable[[], float] = time.time,
) -> Faults:
    return Faults(
        state_directory=directory,
        supervisor=OneRun(run),
        link=link or FakeLink(),
        emit=told.append,
        server_now=server_now,
        settings=Settings(server="http://127.0.0.1:1", name="node-a", state_directory=directory, cgroups=False),
        children=set(),
    )
