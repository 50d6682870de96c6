"""GPUs that do not exist are plausible, move, and are the same for everyone who looks at the same time."""

from __future__ import annotations

from agents.sensors.simulated import SimulatedGpus


async def test_same_node_and_time_give_the_same_values_and_values_move() -> None:
    now = [1000.0]
    gpus = SimulatedGpus(node="n", count=2, busy=lambda: True, clock=lambda: now[0])
    again = SimulatedGpus(node="n", count=2, busy=lambda: True, clock=lambda: now[0])
    first = await gpus.sample()
    assert first == await again.sample()
    now[0] += 5
    assert [sample.power_w for sample in await gpus.sample()] != [sample.power_w for sample in first]


async def test_values_stay_within_what_a_gpu_can_show() -> None:
    now, busy = [0.0], [True]
    gpus = SimulatedGpus(node="n", count=1, busy=lambda: busy[0], clock=lambda: now[0])
    for tick in range(500):
        now[0], busy[0] = tick * 0.7, tick % 50 < 25
        (sample,) = await gpus.sample()
        assert sample.utilization_percent is not None
        assert 0 <= sample.utilization_percent <= 100
        assert sample.power_w is not None
        assert sample.power_limit_w is not None
        assert 0 < sample.power_w < sample.power_limit_w
        assert sample.memory_used_bytes is not None
        assert sample.memory_total_bytes is not None
        assert 0 < sample.memory_used_bytes < sample.memory_total_bytes
    assert (await gpus.start()).simulated
