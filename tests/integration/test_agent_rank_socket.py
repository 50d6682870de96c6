"""The local door for ranks, as a real socket: what is malformed or foreign is dropped and counted."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from pathlib import Path

import pytest

from agents.errors import StateUnusable
from agents.sensors.rank_reports import Said, StepSaid
from agents.sensors.rank_socket import RankSocket, socket_path


def send(path: Path, raw: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(raw, str(path))


def step(number: int, job: str = "j") -> bytes:
    return json.dumps(
        {"kind": "step", "job": job, "generation": 1, "rank": 0, "at": 1.0, "step": number, "loss": float("nan")}
    ).encode()


async def test_takes_what_is_valid_in_order_and_counts_the_rest(tmp_path: Path) -> None:
    heard: list[tuple[Said, int]] = []

    def take(said: Said, user: int) -> bool:
        heard.append((said, user))
        return said.job == "j"

    door = RankSocket(tmp_path / "ranks.sock", take=take)
    door.open()
    try:
        send(door.path, step(1))
        send(door.path, b"nonsense")
        send(door.path, step(2, job="another"))
        send(door.path, step(3))
        await asyncio.sleep(0.05)
        assert [said.step for said, _ in heard if isinstance(said, StepSaid)] == [1, 2, 3]
        assert {user for _, user in heard} == {os.geteuid()}
        assert door.dropped == 2
    finally:
        door.close()
    assert not door.path.exists()


async def test_drain_takes_what_has_arrived_without_waiting_for_the_loop(tmp_path: Path) -> None:
    heard: list[Said] = []
    door = RankSocket(tmp_path / "ranks.sock", take=lambda said, user: not heard.append(said))
    door.open()
    try:
        for number in range(1, 6):
            send(door.path, step(number))
        door.drain()
        assert len(heard) == 5
    finally:
        door.close()


async def test_a_restarted_agent_takes_the_place_of_its_old_socket(tmp_path: Path) -> None:
    path = tmp_path / "ranks.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left_behind:
        left_behind.bind(str(path))
    heard: list[Said] = []
    door = RankSocket(path, take=lambda said, user: not heard.append(said))
    door.open()
    try:
        send(path, step(1))
        door.drain()
        assert len(heard) == 1
    finally:
        door.close()


async def test_does_not_open_where_others_could_put_a_socket_of_their_own(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    door = RankSocket(tmp_path / "ranks.sock", take=lambda said, user: True)
    with pytest.raises(StateUnusable):
        door.open()


def test_a_long_state_directory_gets_a_short_socket_that_stays_the_same(tmp_path: Path) -> None:
    long = tmp_path / ("d" * 120)
    assert socket_path(Path("/s")) == Path("/s/ranks.sock")
    assert socket_path(long) == socket_path(long)
    assert len(str(socket_path(long))) < 100
    assert stat.S_ISDIR(socket_path(long).parent.parent.stat().st_mode)
