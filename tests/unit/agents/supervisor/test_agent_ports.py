"""Ports are held from the reservation on, on all interfaces, against everybody."""

from __future__ import annotations

import socket

import pytest

from agents.errors import CheckFailed
from agents.supervisor.ports import PortReservations

FIRST = 26100


def test_two_agents_of_one_machine_never_get_the_same_port() -> None:
    one, other = PortReservations(FIRST, FIRST + 3), PortReservations(FIRST, FIRST + 3)
    held = [one.reserve(), other.reserve(), one.reserve(), other.reserve()]
    try:
        assert sorted(held) == list(range(FIRST, FIRST + 4))
        with pytest.raises(CheckFailed, match="--port-range") as refused:
            one.reserve()
        assert refused.value.reason == "port_busy"
    finally:
        for port in held:
            one.release(port)
            other.release(port)


def test_a_released_port_can_be_bound_by_its_ranks() -> None:
    ports = PortReservations(FIRST + 10, FIRST + 10)
    port = ports.reserve()
    with socket.socket() as taken, pytest.raises(OSError):
        taken.bind(("0.0.0.0", port))
    ports.release(port)
    with socket.socket() as free:
        free.bind(("0.0.0.0", port))


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_on_any_interface_is_busy(address: str) -> None:
    with socket.socket() as user:
        user.bind((address, FIRST + 20))
        user.listen()
        with pytest.raises(CheckFailed, match="in use"):
            PortReservations(FIRST + 20, FIRST + 20).reserve(FIRST + 20)
        with pytest.raises(CheckFailed):
            PortReservations(FIRST + 20, FIRST + 20).reserve()
