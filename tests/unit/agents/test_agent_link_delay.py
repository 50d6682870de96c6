"""How long the agent waits before it dials again, and what it believes of the server's clock."""

from __future__ import annotations

import pytest

from agents.link import reconnect_delay
from agents.server_clock import ServerClock


def test_full_jitter_grows_to_its_cap_and_starts_at_zero() -> None:
    highest = [reconnect_delay(attempt, base_s=0.5, cap_s=30, draw=lambda low, high: high) for attempt in range(10)]
    assert highest == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert reconnect_delay(9, base_s=0.5, cap_s=30, draw=lambda low, high: low) == 0
    assert reconnect_delay(10_000, base_s=0.5, cap_s=30, draw=lambda low, high: high) == 30


def test_the_shortest_exchange_tells_the_servers_time() -> None:
    clock = ServerClock()
    clock.begin(server_at=1000.0, received_at=400.0)
    assert clock.offset_s == 600
    clock.observe(sent_at=500.0, received_at=504.0, server_at=1103.0)
    clock.observe(sent_at=510.0, received_at=510.2, server_at=1110.1)
    clock.observe(sent_at=520.0, received_at=529.0, server_at=1129.0)
    assert clock.offset_s == pytest.approx(600.0)
    clock.observe(sent_at=540.0, received_at=539.0, server_at=0.0)  # the node's clock was set back in between
    assert clock.offset_s == pytest.approx(600.0)
    clock.begin(server_at=0.0, received_at=0.0)
    assert clock.offset_s == 0
