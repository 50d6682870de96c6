"""What ranks and their node's writer say to each other: JSON in packets over a Unix socket, memory by descriptor.

Standard library only.
"""

from __future__ import annotations

import json
import socket
from typing import Any

_PACKET_BYTES = 64 * 1024


def send(channel: socket.socket, message: dict[str, Any], *, fd: int | None = None) -> None:
    """Send one packet, with a descriptor if there is one. Raises OSError where the other side is gone."""
    data = json.dumps(message).encode()
    if fd is None:
        channel.send(data)
    else:
        socket.send_fds(channel, [data], [fd])


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, int | None]:
    """The next packet and its descriptor; None where the other side is gone. Raises BlockingIOError."""
    try:
        data, fds, _, _ = socket.recv_fds(channel, _PACKET_BYTES, 1)
    except ConnectionError:
        return None, None
    return (json.loads(data) if data else None), (fds[0] if fds else None)
