from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import BadDatagram
from everstep.telemetry import BACKLOG_LIMIT, MAX_DATAGRAM_BYTES, Telemetry, decode, encode


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


def bind(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(path))
    receiver.setblocking(False)
    return receiver


def test_datagram_arrives_with_identity_and_fields(path: Path) -> None:
    with bind(path) as receiver:
        telemetry = Telemetry(socket_path=str(path), job="j1", generation=2, rank=1)
        assert telemetry.send("step", step=7, loss=0.1)
        fields = decode(receiver.recv(MAX_DATAGRAM_BYTES))
    assert (fields["kind"], fields["job"], fields["generation"], fields["rank"]) == ("step", "j1", 2, 1)
    assert fields["loss"].hex() == (0.1).hex()
    assert fields["pid"] and fields["at"]


def test_full_socket_neither_blocks_nor_raises_and_loses_only_the_oldest(path: Path) -> None:
    with bind(path) as receiver:
        telemetry = Telemetry(socket_path=str(path), job="j1", generation=1, rank=0)
        sent = 0
        while telemetry.send("step", step=sent):
            sent += 1
        for number in range(sent + 1, sent + BACKLOG_LIMIT + 50):
            assert not telemetry.send("step", step=number)
        steps = []
        while True:
            try:
                steps.append(decode(receiver.recv(MAX_DATAGRAM_BYTES))["step"])
            except BlockingIOError:
                if telemetry.send("finished", step=10**9):
                    break
    assert steps == sorted(steps)


def test_restarted_agent_gets_what_was_sent_meanwhile(path: Path) -> None:
    telemetry = Telemetry(socket_path=str(path), job="j1", generation=1, rank=0)
    assert not telemetry.send("resumed", step=0)
    with bind(path) as first:
        assert telemetry.send("step", step=1)
        assert decode(first.recv(MAX_DATAGRAM_BYTES))["kind"] == "resumed"
    assert not telemetry.send("step", step=2)
    with bind(path) as second:
        telemetry.close()
        assert decode(second.recv(MAX_DATAGRAM_BYTES))["step"] == 2


def test_agent_that_restarts_between_two_datagrams_gets_the_second_at_once(path: Path) -> None:
    telemetry = Telemetry(socket_path=str(path), job="j1", generation=1, rank=0)
    for step in (1, 2):
        with bind(path) as receiver:
            assert telemetry.send("step", step=step)
            assert decode(receiver.recv(MAX_DATAGRAM_BYTES))["step"] == step


def test_agent_that_was_replaced_while_it_hung_does_not_keep_its_ranks(path: Path) -> None:
    telemetry = Telemetry(socket_path=str(path), job="j1", generation=1, rank=0)
    with bind(path):
        while telemetry.send("step", step=1):
            continue
        with bind(path) as successor:
            telemetry.send("step", step=2)
            assert decode(successor.recv(MAX_DATAGRAM_BYTES))["kind"] == "step"


def test_without_a_socket_nothing_is_sent() -> None:
    telemetry = Telemetry(socket_path=None, job="j1", generation=1)
    assert not telemetry.send("poke")
    telemetry.close()


def test_values_that_json_cannot_hold_are_dropped(path: Path) -> None:
    with bind(path):
        assert not Telemetry(socket_path=str(path), job="j1", generation=1).send("step", loss=object())


def test_refuses_an_oversized_datagram() -> None:
    with pytest.raises(BadDatagram, match="over the limit"):
        encode({"kind": "step", "text": "x" * MAX_DATAGRAM_BYTES})


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff",
        b"[1]",
        b'{"kind":"step"}',
        b'{"kind":"launch","job":"j","generation":1}',
        b'{"kind":"step","job":"j","generation":true}',
        b"[" * 50_000,
    ],
)
def test_refuses_what_is_not_a_datagram(frame: bytes) -> None:
    with pytest.raises(BadDatagram):
        decode(frame)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_decode_raises_nothing_but_its_own_error(frame: bytes) -> None:
    with contextlib.suppress(BadDatagram):
        decode(frame)


@given(st.floats(allow_nan=False))
@settings(deadline=None)
def test_losses_survive_the_wire_bit_for_bit(loss: float) -> None:
    frame = encode({"kind": "step", "job": "j", "generation": 1, "loss": loss})
    assert decode(frame)["loss"].hex() == loss.hex()
    assert json.loads(frame)
