"""What Everstep adds to each training step: the lease, the progress slot, the rank's log and the datagram.

    .venv/bin/python benchmarks/step_overhead.py

All variants alternate within one run, round by round: compare the ratios, not the microseconds of different runs. Time
is that of the training thread on the CPU, so that other load counts less. The step itself is empty; a real one takes
milliseconds. The last line is JSON; nothing is judged here.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

import everstep
from everstep.data import indices_digest
from everstep.elastic.lease import Held, Phase
from everstep.elastic.lease_files import LeaseFiles, LeasePaths, boottime_ns
from everstep.rank_lease import RankLease
from everstep.rank_log import RankLog
from everstep.telemetry import Telemetry, encode_fields

NODE_RANKS = (1, 8)
BATCHES = (8, 64, 512)
"""Samples of one rank's step."""


def new_lease(root: Path, *, ranks: int) -> LeasePaths:
    """Files as an agent and a runner make them; every neighbour is in a step."""
    root.mkdir()
    now_ns = boottime_ns()
    (root / "contact").write_bytes(struct.pack("<Q", now_ns))
    (root / "progress").write_bytes(struct.pack("<QII", now_ns, Phase.STEP, 10) * ranks)
    (root / "lease.json").write_text(json.dumps({"step_s": 600.0}))
    paths = LeasePaths(contact=root / "contact", progress=root / "progress", terms=root / "lease.json")
    LeaseFiles(paths).write_kept(Held(sign_ns=now_ns, limit_ns=600 * 10**9))
    return paths


def advance_seconds(lease: RankLease, count: int) -> float:
    started = time.thread_time()
    for step in range(count):
        lease.advance(Phase.STEP, steps=step)
    return (time.thread_time() - started) / count


def look_seconds(lease: RankLease, count: int) -> float:
    """With a sign of its own that is older than the shortest limit, as after a long step."""
    lease._sign_ns -= 3600 * 10**9
    started = time.thread_time()
    for _ in range(count):
        lease.check()
    return (time.thread_time() - started) / count


def step_seconds(steps: Iterator[int], run: everstep.Run, count: int) -> float:
    started = time.thread_time()
    for _ in range(count):
        next(steps)
        run.report(loss=0.5, learning_rate=0.1)
    return (time.thread_time() - started) / count


def full_step_seconds(
    steps: Iterator[int], run: everstep.Run, sampler: everstep.ReplayableSampler, count: int
) -> float:
    """Everything that can be reported: span and checksum, samples, time split, norms, tokens, memory.

    The batches are made beforehand, checksums included: a loader does that in its workers.
    """
    made = list(itertools.islice(sampler.stream(), count))
    batches = run.batches(made)
    started = time.thread_time()
    for _ in range(count):
        next(steps)
        span = next(batches).span
        run._split._before_optimizer()  # what the optimizer's hooks cost, without an optimizer
        run._split._after_optimizer()
        with run.wait():
            pass
        run.report(loss=0.5, learning_rate=0.1, grad_norm=1.5, parameter_norm=20.5, span=span, tokens=4096)
    return (time.thread_time() - started) / count


def datagram_seconds(telemetry: Telemetry, count: int) -> float:
    """Made and sent, with all that can be reported; neither the log nor what collects the numbers."""
    fields = {
        "step": 123_456, "loss": 2.7182818284, "learning_rate": 0.0030000001, "grad_norm": 1.4142135623,
        "step_time_s": 0.1234567891, "parameter_norm": 20.123456789, "samples": 16, "tokens": 4096,
        "epoch_size": 10**6, "indices_digest": "0123456789abcdef", "order_digest": "0123456789abcdef", "epoch": 1,
        "span_start": 123_456, "span_stop": 123_472, "optimizer_s": 0.0123456789, "wait_s": 0.0012345678,
        "data_s": 0.0023456789, "forward_backward_s": 0.0987654321, "memory_bytes": 1_234_567_890,
    }  # fmt: skip
    started = time.thread_time()
    for _ in range(count):
        telemetry.send_encoded("step", encode_fields(fields))
    return (time.thread_time() - started) / count


def checksum_seconds(size: int, count: int) -> float:
    indices = list(range(10**6, 10**6 + size))
    started = time.thread_time()
    for _ in range(count):
        indices_digest(indices)
    return (time.thread_time() - started) / count


def new_run(root: Path, environment: dict[str, str], total_steps: int, sampler: Any = None) -> everstep.Run:
    """A run whose environment is as given; it reads that once, when it is made."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        run = everstep.Run(total_steps=total_steps, save_every=total_steps, checkpoint_directory=root)
    finally:
        os.environ.clear()
        os.environ.update(before)
    run.track(model=nn.Linear(1, 1), optimizer=None, scheduler=None, sampler=sampler)
    run.resume()
    return run


def variants(root: Path, agent: Path, total_steps: int) -> dict[str, Callable[[int], float]]:
    """Each maps a number of steps to seconds per step."""
    found: dict[str, Callable[[int], float]] = {}
    for ranks in NODE_RANKS:
        paths = new_lease(root / f"lease-{ranks}", ranks=ranks)
        lease = RankLease(paths, local_rank=0, log=RankLog(None, rank=0, generation=1))
        found[f"lease and progress, 1 of {ranks} ranks on the node"] = partial(advance_seconds, lease)
        slow = RankLease(paths, local_rank=0, log=RankLog(None, rank=0, generation=1))
        found[f"the lease's whole look, 1 of {ranks} ranks"] = partial(look_seconds, slow)
    told = {"EVERSTEP_SOCKET": str(agent), "EVERSTEP_LOG_DIR": str(root / "logs"), "EVERSTEP_GENERATION": "1"}
    runs = {
        "a whole empty step, nobody to tell": {},
        "a whole empty step, log and agent": told,
        "a whole empty step, log, agent and lease": told
        | new_lease(root / "lease-run", ranks=NODE_RANKS[-1]).as_environment(),
    }
    for number, (name, environment) in enumerate(runs.items()):
        run = new_run(root / f"checkpoints-{number}", environment, total_steps)
        steps = run.steps()
        next(steps)
        run.report(loss=0.5)
        found[name] = partial(step_seconds, steps, run)
    sampler = everstep.ReplayableSampler(10**6, global_batch_size=16)
    run = new_run(root / "checkpoints-full", told, total_steps, sampler)
    steps = run.steps()
    next(steps)
    run.report(loss=0.5, span=next(sampler.stream()).span)
    found["a whole step with all that can be reported"] = partial(full_step_seconds, steps, run, sampler)
    telemetry = Telemetry(socket_path=str(agent), job="benchmark", generation=1, rank=0)
    found["its datagram alone"] = partial(datagram_seconds, telemetry)
    for size in BATCHES:
        found[f"checksum of the indices of {size} samples"] = partial(checksum_seconds, size)
    return found


def drain(agent: socket.socket) -> NoReturn:
    """What a node's agent does: read at once, and let go. Ends with the benchmark."""
    parent = os.getppid()
    agent.settimeout(1.0)
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            agent.recv(65536)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2000, help="steps of each variant in each round")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        root = Path(directory)
        agent.bind(str(root / "s"))
        reader = os.fork()
        if reader == 0:  # a process of its own, as an agent is one: a thread would take turns with the steps
            drain(agent)
        measured = variants(root, root / "s", total_steps=arguments.rounds * arguments.steps + 10)
        seconds: dict[str, list[float]] = {name: [] for name in measured}
        for _ in range(arguments.rounds):
            for name, measure in measured.items():
                seconds[name].append(measure(arguments.steps))
        reference = statistics.median(seconds["a whole empty step, log and agent"])
        print(f"{arguments.rounds} rounds of {arguments.steps} steps; microseconds of CPU per step")
        print(f"{'':54}{'min':>8}{'median':>8}{'max':>8}{'ratio':>8}")
        for name, values in seconds.items():
            low, middle, high = min(values) * 1e6, statistics.median(values) * 1e6, max(values) * 1e6
            print(f"{name:54}{low:8.1f}{middle:8.1f}{high:8.1f}{middle / 1e6 / reference:8.2f}")
        print("ratio: of medians, to a whole empty step with log and agent, without a lease")
        medians_us = {name: round(statistics.median(values) * 1e6, 1) for name, values in seconds.items()}
        full_us = medians_us["a whole step with all that can be reported"]
        outcome = {"rounds": arguments.rounds, "full_step_us": full_us, "datagram_us": medians_us["its datagram alone"]}
        print(json.dumps(outcome | {"medians_us": medians_us}), flush=True)
        os._exit(0)  # the runs are not at their end, and have nothing to say about it


if __name__ == "__main__":
    main()
