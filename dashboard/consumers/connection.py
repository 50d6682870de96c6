"""One open socket of one node, as the agents' consumer and its fleet know it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.db import InterfaceError, OperationalError

from agents.protocol.codec import encode_frame
from agents.protocol.errors import CloseCode
from agents.protocol.messages import FromAgent, Goodbye, GpuSample, Message
from agents.protocol.session import ServerSession
from dashboard.database_writer import writer
from recovery import sessions
from recovery.ids import fresh_id

log = logging.getLogger(__name__)

PUSH_AGAIN_AFTER_S = 5.0
"""An order that the agent has not taken over by then is sent once more: its disk may have been full."""
CLOCK_BEATS = 30
"""Heartbeats that tell the offset of an agent's clock; older ones are forgotten, since clocks are put right."""
MAX_WAITING_FACTS = 2000
SEND_WITHIN_S = 5.0
"""A peer whose socket takes nothing for this long is let go: orders to all others wait behind it."""
DATABASE_AWAY = (OperationalError, InterfaceError)

Send = Callable[[dict[str, Any]], Any]


@dataclass(eq=False)
class Connection:
    """One open socket of one node."""

    node_id: int
    node: str
    send: Send
    session: str = field(default_factory=lambda: fresh_id("ses"))
    protocol: ServerSession = field(default_factory=ServerSession)
    facts: asyncio.Queue[tuple[int, FromAgent]] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING_FACTS))
    heard_at: float | None = None
    """On the monotonic clock: the wall clock may be put right between two heartbeats."""
    recorded_at: float = -math.inf
    """On the monotonic clock: the newest record that holds this connection was taken then."""
    clock_deltas: deque[float] = field(default_factory=lambda: deque(maxlen=CLOCK_BEATS))
    seen_revision: int = 0
    wanted_revision: int = 0
    pushed_revision: int = -1
    pushed_at: float = 0.0
    """On the monotonic clock."""
    gpus: asyncio.Task[None] | None = None
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    last_words: Goodbye | None = None

    @property
    def offset_s(self) -> float | None:
        """Server's clock minus the agent's: the least delayed heartbeat tells it best. None before the first one."""
        return min(self.clock_deltas, default=None)

    @property
    def is_behind(self) -> bool:
        """The agent has had its order for a while and has not taken it over."""
        late = time.monotonic() - self.pushed_at > PUSH_AGAIN_AFTER_S
        return late and self.seen_revision < self.pushed_revision

    async def say(self, message: Message) -> None:
        await self.send({"type": "websocket.send", "bytes": encode_frame(message)})

    def keep_gpus(self, samples: list[GpuSample]) -> None:
        """Write the latest samples beside the conversation: heartbeats never wait for them, and they may be lost."""
        if self.gpus is None or self.gpus.done():
            self.gpus = asyncio.create_task(_record_gpus(self, samples))

    def close(self, code: CloseCode, reason: str) -> None:
        """Ask the socket's own task to say goodbye and close."""
        if self.last_words is None:
            self.last_words = Goodbye(code=int(code), reason=reason)
            self.closing.set()


async def _record_gpus(connection: Connection, samples: list[GpuSample]) -> None:
    try:
        await writer.run(sessions.record_gpus, connection.node_id, samples)
    except Exception as err:
        log.warning("node=%s GPU samples not stored: %s", connection.node, err)
