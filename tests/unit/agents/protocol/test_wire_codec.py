"""Frames: every message survives the way there, a newer peer may say more, and nonsense is refused with a sentence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wire_examples import AGENT_TYPES, SERVER_TYPES, agent_messages, server_messages, values_of

from agents.protocol.codec import FrameDecoder, agent_frames, encode_frame, server_frames
from agents.protocol.errors import (
    RETRY_FORBIDDEN,
    CloseCode,
    MalformedFrame,
    OutOfOrder,
    OversizedFrame,
    ProtocolError,
    UnknownMessageType,
    UnsupportedVersion,
)
from agents.protocol.messages import DURABLE, Heartbeat, Message, RankExited
from agents.protocol.version import MAX_FRAME_BYTES

BEAT = Heartbeat(at=1.0, revision=3)


def packed(*parts: Any) -> bytes:
    return msgspec.msgpack.encode(parts)


def tag_of(kind: type[Message]) -> str:
    return str(kind.__struct_config__.tag)


# --- The way there ---


@pytest.mark.parametrize("kind", AGENT_TYPES, ids=tag_of)
@settings(max_examples=25)
@given(data=st.data(), seq=st.integers(0, 2**63 - 1))
def test_what_agents_say_arrives_as_it_was_sent(kind: type[Message], data: st.DataObject, seq: int) -> None:
    message = data.draw(values_of(kind))
    assert agent_frames().decode(encode_frame(message, seq=seq)) == (seq, message)


@pytest.mark.parametrize("kind", SERVER_TYPES, ids=tag_of)
@settings(max_examples=25)
@given(data=st.data())
def test_what_the_server_says_arrives_as_it_was_sent(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    assert server_frames().decode(encode_frame(message)) == (0, message)


@given(
    message=agent_messages,
    extra=st.dictionaries(
        st.text("xyz", min_size=12, max_size=16), st.integers(0, 9) | st.text(), min_size=1, max_size=3
    ),
)
def test_unknown_fields_are_ignored(message: Message, extra: dict[str, Any]) -> None:
    body = {**msgspec.to_builtins(message), **extra}
    assert agent_frames().decode(packed(7, body)) == (7, message)


def test_unknown_elements_behind_the_message_are_ignored() -> None:
    assert agent_frames().decode(packed(7, msgspec.to_builtins(BEAT), "new", 5)) == (7, BEAT)


def test_each_message_type_has_a_tag_of_its_own() -> None:
    tags = [tag_of(kind) for kind in {*AGENT_TYPES, *SERVER_TYPES}]
    assert len(tags) == len(set(tags))


def test_durable_messages_all_flow_from_agents() -> None:
    assert set(DURABLE) <= set(AGENT_TYPES)


# --- What is refused ---


def refused(frame: bytes, decoder: FrameDecoder[Any] | None = None) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        (decoder or agent_frames()).decode(frame)
    return caught.value


def test_an_unknown_type_is_refused_and_named() -> None:
    error = refused(packed(0, {"type": "teleport"}))
    assert isinstance(error, UnknownMessageType)
    assert error.code == CloseCode.UNKNOWN_TYPE
    assert "'teleport'" in error.reason
    assert "Upgrade the older side" in error.reason


def test_a_long_unknown_type_is_cut() -> None:
    assert len(refused(packed(0, {"type": "x" * 10_000})).reason) < 300


def test_messages_of_the_other_direction_are_refused() -> None:
    assert isinstance(refused(encode_frame(BEAT), server_frames()), UnknownMessageType)


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, MAX_FRAME_BYTES * 3])
def test_an_oversized_frame_is_refused_unread(size: int) -> None:
    error = refused(b"\xc1" * size)
    assert isinstance(error, OversizedFrame)
    assert error.code == CloseCode.OVERSIZED
    assert str(size) in error.reason
    assert "smaller" in error.reason


def test_an_oversized_message_is_never_sent() -> None:
    big = RankExited(job="j", generation=1, rank=0, pid=1, at=0.0, detail="x" * (MAX_FRAME_BYTES + 1))
    with pytest.raises(OversizedFrame):
        encode_frame(big)


def test_the_largest_frame_is_taken() -> None:
    padding = b"x" * (MAX_FRAME_BYTES - len(packed(0, {**msgspec.to_builtins(BEAT), "pad": ""})) - 4)
    frame = packed(0, {**msgspec.to_builtins(BEAT), "pad": padding.decode()})
    assert MAX_FRAME_BYTES - 8 <= len(frame) <= MAX_FRAME_BYTES
    assert agent_frames().decode(frame) == (0, BEAT)


MALFORMED = {
    "empty": b"",
    "no msgpack": b"\xc1\xc1",
    "cut": encode_frame(BEAT)[:-3],
    "trailing bytes": encode_frame(BEAT) + b"\x00",
    "no envelope": msgspec.msgpack.encode(msgspec.to_builtins(BEAT)),
    "body is no map": packed(0, 5),
    "body without a type": packed(0, {}),
    "type is no text": packed(0, {"type": 7}),
    "negative number": packed(-1, msgspec.to_builtins(BEAT)),
    "number is text": packed("1", msgspec.to_builtins(BEAT)),
    "missing field": packed(0, {"type": "heartbeat"}),
    "wrong field": packed(0, {"type": "heartbeat", "at": "now", "revision": 1}),
    "generation 0": packed(1, {"type": "rank_started", "job": "j", "generation": 0, "rank": 0, "pid": 1, "at": 0.0}),
    "empty name": packed(1, {"type": "rank_started", "job": "", "generation": 1, "rank": 0, "pid": 1, "at": 0.0}),
    "long name": packed(1, {"type": "rank_started", "job": "j" * 201, "generation": 1, "rank": 0, "pid": 1, "at": 0.0}),
    "deep": b"\x92\x00" + b"\x91" * 100_000,
    "array that claims 4 billion elements": b"\x92\x00\xdd\xff\xff\xff\xff",
    "map that claims 4 billion elements": b"\x92\x00\xdf\xff\xff\xff\xff",
    "text that is no UTF-8": b"\x92\x00\x81\xa4type\xa2\xff\xfe",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_frame_is_refused_with_a_sentence(name: str) -> None:
    error = refused(MALFORMED[name])
    assert isinstance(error, MalformedFrame | UnknownMessageType)
    assert error.code in (CloseCode.MALFORMED, CloseCode.UNKNOWN_TYPE)
    assert error.reason.endswith(".")
    assert len(error.reason) < 1000


@given(frame=st.binary(max_size=300))
@example(frame=b"\x92\x00\x81\xa4type\xaaheartbeats")
def test_any_bytes_are_a_message_or_a_protocol_error(frame: bytes) -> None:
    for decoder in (agent_frames(), server_frames()):
        try:
            seq, _ = decoder.decode(frame)
        except ProtocolError as error:
            assert error.reason
        else:
            assert seq >= 0


@given(message=agent_messages, data=st.data())
def test_a_damaged_message_is_a_message_or_a_protocol_error(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode_frame(message, seq=1))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        try:
            agent_frames().decode(damaged)
        except ProtocolError as error:
            assert error.reason


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(seq=_json, body=st.dictionaries(st.sampled_from(["type", "job", "generation", "at", "samples", "steps"]), _json))
def test_any_values_in_any_field_are_a_message_or_a_protocol_error(seq: Any, body: dict[str, Any]) -> None:
    for kind in AGENT_TYPES:
        try:
            agent_frames().decode(packed(seq, {**body, "type": tag_of(kind)}))
        except ProtocolError as error:
            assert error.reason


# --- The errors themselves ---

ERRORS = [
    MalformedFrame("x"),
    UnknownMessageType("x"),
    OversizedFrame(2, 1),
    UnsupportedVersion(9, oldest=1, newest=2),
    OutOfOrder("Message 5 came where 3 was due."),
]


def test_each_error_has_a_close_code_of_its_own_in_the_range_for_applications() -> None:
    codes = [error.code for error in ERRORS]
    assert len(set(codes)) == len(codes)
    assert all(4000 <= code <= 4999 for code in CloseCode)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_each_error_says_what_to_do(error: ProtocolError) -> None:
    assert any(word in error.reason for word in ("Use", "Upgrade", "Send", "Install", "Reconnect"))


def test_trying_again_is_only_forbidden_where_an_operator_has_to_act() -> None:
    assert {CloseCode.UNAUTHORIZED, CloseCode.REVOKED, CloseCode.UNSUPPORTED_VERSION} == RETRY_FORBIDDEN


@given(message=server_messages)
def test_server_messages_are_unknown_to_the_server_unless_both_sides_say_them(message: Message) -> None:
    both = {tag_of(kind) for kind in AGENT_TYPES} & {tag_of(kind) for kind in SERVER_TYPES}
    if tag_of(type(message)) not in both:
        assert isinstance(refused(encode_frame(message)), UnknownMessageType)
