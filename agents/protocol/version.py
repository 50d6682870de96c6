"""The version of the wire between agents and server; both ends import it from here."""

PROTOCOL_VERSION = 2
"""Raised when an old peer could misread a new message. Adding an optional field does not raise it."""

OLDEST_SUPPORTED_VERSION = 1
"""The server accepts agents from this version on."""

MAX_FRAME_BYTES = 1 << 20
"""Larger frames close the connection: one second of one node's samples is about 2 kB."""
