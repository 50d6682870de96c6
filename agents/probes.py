"""Knocking at another node on the server's behalf: whether its kernel answers on the network, told at most once each.

The daemon hands over the probes of each order. A silent agent says nothing of its node; a kernel that answers, even
with a refusal, says that the node is up.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

from agents.log_lines import NodeLog
from agents.protocol.messages import Message, ProbeOrder, ProbeOutcome, ProbeReport

log = NodeLog(__name__)

LIMIT_S = 2.0
_MOST_AT_ONCE = 32
_ANSWERED = (errno.ECONNREFUSED, errno.ECONNRESET)
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ETIMEDOUT)


class Probes:
    """All probes of this agent."""

    def __init__(
        self, *, emit: Callable[[Message], None], server_now: Callable[[], float], told: Callable[[], Container[str]]
    ) -> None:
        self._emit = emit
        self._server_now = server_now
        self._told = told
        """Probes that were answered already, also by an earlier life of this agent."""
        self._running: dict[str, asyncio.Task[None]] = {}

    def take(self, orders: Sequence[ProbeOrder]) -> None:
        """Begin those of an order that are new and not too late."""
        for order in orders:
            known = order.probe in self._running or order.probe in self._told()
            if known or self._server_now() > order.not_after:
                continue
            if len(self._running) >= _MOST_AT_ONCE:
                self._tell(order, ProbeOutcome.FAILED, f"{_MOST_AT_ONCE} probes are under way already")
                continue
            self._running[order.probe] = asyncio.create_task(self._probe(order))

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, order: ProbeOrder) -> None:
        try:
            began = time.monotonic()
            outcome, words = await knock(order.address, order.port)
            self._tell(order, outcome, f"{words}, after {time.monotonic() - began:.2f} s")
        finally:
            self._running.pop(order.probe, None)

    def _tell(self, order: ProbeOrder, outcome: ProbeOutcome, words: str) -> None:
        log.info("probe", node=order.node, address=order.address, port=order.port, outcome=outcome, detail=words)
        detail = f"{order.address} port {order.port}: {words}"[:4000]
        self._emit(ProbeReport(probe=order.probe, outcome=outcome, at=time.time(), detail=detail))


async def knock(address: str, port: int, *, limit_s: float = LIMIT_S) -> tuple[ProbeOutcome, str]:
    """Try to connect to each address of a host in turn. Returns what that says of its kernel, and how."""
    found = (ProbeOutcome.FAILED, "the host has no address")
    try:
        async with asyncio.timeout(limit_s):
            places = await asyncio.get_running_loop().getaddrinfo(address, port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, place in places:
                found = await _knock_once(family, kind, protocol, place)
                if found[0] is ProbeOutcome.REACHABLE:
                    break
    except TimeoutError:
        return ProbeOutcome.UNREACHABLE, "no answer"
    except (OSError, ValueError, OverflowError, UnicodeError) as err:
        return ProbeOutcome.FAILED, str(err)
    return found


async def _knock_once(family: int, kind: int, protocol: int, place: Any) -> tuple[ProbeOutcome, str]:
    """Raises `OSError` if there is not even a socket."""
    with socket.socket(family, kind, protocol) as knocking:
        knocking.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(knocking, place)
        except OSError as err:
            words = os.strerror(err.errno) if err.errno else str(err)
            if err.errno in _ANSWERED:
                return ProbeOutcome.REACHABLE, words
            return (ProbeOutcome.UNREACHABLE if err.errno in _NO_WAY else ProbeOutcome.FAILED), words
    return ProbeOutcome.REACHABLE, "connected"
