"""The error family of the wire: each error knows its close code and says what to do."""

from __future__ import annotations

from enum import IntEnum


class CloseCode(IntEnum):
    """WebSocket close codes of the agents' route (4000 to 4999 are free for applications)."""

    MALFORMED = 4400
    UNAUTHORIZED = 4401
    REVOKED = 4403
    UNKNOWN_TYPE = 4404
    UNSUPPORTED_VERSION = 4406
    OUT_OF_ORDER = 4409
    SUPERSEDED = 4410
    OVERSIZED = 4413
    TOO_MANY_MESSAGES = 4429
    SERVER_ERROR = 4500


RETRY_FORBIDDEN = frozenset({CloseCode.UNAUTHORIZED, CloseCode.REVOKED, CloseCode.UNSUPPORTED_VERSION})
"""An agent that is closed with one of these waits for its operator (slow retry), since trying again cannot help."""


class ProtocolError(Exception):
    """A peer broke the protocol; `reason` is sent as `Goodbye` and ends the connection with `code`."""

    code: CloseCode = CloseCode.MALFORMED

    @property
    def reason(self) -> str:
        return str(self)


class MalformedFrame(ProtocolError):
    code = CloseCode.MALFORMED

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"This frame is not a message of the agent protocol ({detail}). Use an agent of a supported version."
        )


class UnknownMessageType(ProtocolError):
    code = CloseCode.UNKNOWN_TYPE

    def __init__(self, tag: str) -> None:
        super().__init__(
            f"Message type {tag[:60]!r} is unknown here. Upgrade the older side, so that both speak the same protocol."
        )


class OversizedFrame(ProtocolError):
    code = CloseCode.OVERSIZED

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"A frame of {size_bytes} bytes is over the limit of {limit_bytes}. Send smaller batches.")


class UnsupportedVersion(ProtocolError):
    code = CloseCode.UNSUPPORTED_VERSION

    def __init__(self, theirs: int, *, oldest: int, newest: int) -> None:
        super().__init__(
            f"The agent speaks protocol {theirs}; this server supports {oldest} to {newest}. "
            f"Install an agent of the server's release on this node."
        )


class OutOfOrder(ProtocolError):
    code = CloseCode.OUT_OF_ORDER

    def __init__(self, detail: str) -> None:
        super().__init__(f"{detail} Reconnect: the agent sends what was not acknowledged once more.")
