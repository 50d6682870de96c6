"""Ports for rendezvous: reserved while a plan is prepared, free again in the moment before its ranks need them.

Torch's store listens on all interfaces, so a port counts as free only if it can be bound on all of them.
"""

from __future__ import annotations

import random
import socket

from agents.errors import CheckFailed

PORT_BUSY = "port_busy"


class PortReservations:
    """Holds bound, not listening, sockets: no other agent or program on this machine can take the same port."""

    def __init__(self, first: int, last: int) -> None:
        self._range = range(first, last + 1)
        self._held: dict[int, list[socket.socket]] = {}

    def reserve(self, wanted: int | None = None) -> int:
        """Hold one port, `wanted` if given, and return it. Raises `CheckFailed` with reason `port_busy`."""
        # Not in order: agents that share a machine, and quick relaunches, would meet at the lowest one.
        candidates = random.sample(self._range, len(self._range)) if wanted is None else [wanted]
        for port in candidates:
            if port in self._held:
                continue
            held = _bind_everywhere(port)
            if held is not None:
                self._held[port] = held
                return port
        if wanted is not None:
            raise CheckFailed(f"Port {wanted} is in use on this node.", reason=PORT_BUSY)
        raise CheckFailed(
            f"No port of {self._range.start} to {self._range.stop - 1} is free on this node: widen --port-range.",
            reason=PORT_BUSY,
        )

    def release(self, port: int) -> None:
        """Let go of a port, so that its ranks can bind it; no error if it is not held."""
        for held in self._held.pop(port, ()):
            held.close()


def _bind_everywhere(port: int) -> list[socket.socket] | None:
    held: list[socket.socket] = []
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104  that is the check
        try:
            bound = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # a kernel without IPv6
            continue
        try:
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((address, port))
        except OSError:
            bound.close()
            if family == socket.AF_INET6 and not _has_ipv6():
                continue
            for other in held:
                other.close()
            return None
        held.append(bound)
    return held


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True
