"""Bytes to messages and back: one msgpack frame holds a sequence number (0 for what may be lost) and one message."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from agents.protocol.errors import MalformedFrame, OversizedFrame, UnknownMessageType
from agents.protocol.messages import FromAgent, FromServer, Message
from agents.protocol.version import MAX_FRAME_BYTES

M = TypeVar("M")


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=False):
    seq: int
    body: msgspec.Raw


class _Tag(msgspec.Struct, frozen=True):
    type: str = ""


def _known_tags(union: Any) -> frozenset[str]:
    return frozenset(str(member.__struct_config__.tag) for member in union.__args__)


class FrameDecoder(Generic[M]):
    """Decodes frames of one direction. Raises a `ProtocolError` that names the close code and what to do."""

    def __init__(self, union: Any, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._envelope = msgspec.msgpack.Decoder(_Envelope)
        self._body: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)
        self._tag = msgspec.msgpack.Decoder(_Tag)
        self._known = _known_tags(union)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes) -> tuple[int, M]:
        """Return (sequence number, message); the number is 0 for messages that may be lost."""
        if len(frame) > self._max_bytes:
            raise OversizedFrame(len(frame), self._max_bytes)
        try:
            envelope = self._envelope.decode(frame)
            tag = self._tag.decode(envelope.body).type
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
            raise MalformedFrame(str(err)) from err
        if tag not in self._known:
            raise UnknownMessageType(tag)
        if envelope.seq < 0:
            raise MalformedFrame(f"sequence number {envelope.seq} is negative")
        try:
            return envelope.seq, self._body.decode(envelope.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
            raise MalformedFrame(f"{tag}: {err}") from err


_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Message, *, seq: int = 0, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Encode one message. Raises `OversizedFrame` rather than send what the peer must refuse."""
    frame = _encoder.encode((seq, message))
    if len(frame) > max_bytes:
        raise OversizedFrame(len(frame), max_bytes)
    return frame


_ENVELOPE_BYTES = 10
"""What an envelope adds to its message at most: the array's head and the number."""


def encode_body(message: Message, *, max_bytes: int = MAX_FRAME_BYTES - _ENVELOPE_BYTES) -> bytes:
    """Encode a message that gets its envelope later, by `frame_of_body`. Raises `OversizedFrame`."""
    body = _encoder.encode(message)
    if len(body) > max_bytes:
        raise OversizedFrame(len(body), max_bytes)
    return body


def frame_of_body(body: bytes, *, seq: int) -> bytes:
    """Put an encoded message into its envelope."""
    return _encoder.encode((seq, msgspec.Raw(body)))


def agent_frames() -> FrameDecoder[FromAgent]:
    """A decoder for what agents send."""
    return FrameDecoder(FromAgent)


def server_frames() -> FrameDecoder[FromServer]:
    """A decoder for what the server sends."""
    return FrameDecoder(FromServer)
