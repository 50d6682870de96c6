"""One node's ranks as torch elastic's worker group: static rendezvous from the plan, no restarts, cold start.

The runner calls `run_worker_group`. It is `torch.distributed.launcher.elastic_launch` with the agent made here, so
that each rank can be watched from its first moment, and without `LaunchConfig`, which initialises CUDA.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters

from everstep.elastic import rank_entry
from everstep.elastic.launch import Launch

MONITOR_INTERVAL_S = 0.05
RENDEZVOUS_LIMIT_S = 300
"""Torch's own limit is a backstop: the server's deadline ends a launch, by having the agent kill the runner."""

OnStart = Callable[[int, "Popen[bytes]"], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`reason`: "" for success, else `port_busy`, `rendezvous`, `rank_failed` or `error`."""

    reason: str
    detail: str = ""


class WatchedAgent(LocalElasticAgent):
    """Torch elastic's agent; hands out each rank's process as soon as it is started, by global rank."""

    def __init__(self, *, on_start: OnStart, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._on_start = on_start
        self.started = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self.started = True
        handlers = self._pcontext.subprocess_handlers  # type: ignore[union-attr]
        for worker in worker_group.workers:
            self._on_start(worker.global_rank, handlers[worker.local_rank].proc)
        return pids


def run_worker_group(launch: Launch, directory: Path, *, on_start: OnStart) -> Outcome:
    """Start the ranks and wait for their end. Call from the main thread: ranks die with the thread that forks them."""
    parameters = RendezvousParameters(
        backend="static",
        endpoint=f"{launch.master_address}:{launch.master_port}",
        run_id=launch.run_id,
        min_nodes=launch.node_count,
        max_nodes=launch.node_count,
        rank=launch.node_rank,
        timeout=RENDEZVOUS_LIMIT_S,
    )
    handler = rendezvous_registry.get_rendezvous_handler(parameters)
    agent = WatchedAgent(
        on_start=on_start,
        spec=WorkerSpec(
            role="everstep",
            local_world_size=launch.ranks_per_node,
            entrypoint=sys.executable,
            args=("-I", "-S", rank_entry.__file__, str(directory)),
            rdzv_handler=handler,
            max_restarts=0,
            monitor_interval=MONITOR_INTERVAL_S,
            master_addr=launch.master_address,
            master_port=launch.master_port,
            local_addr=launch.master_address if launch.node_rank == 0 else None,
        ),
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        shutdown_timeout=max(1, int(launch.stop_limit_s)),
    )
    try:
        result = agent.run()
    except (DistError, RendezvousError) as err:
        return Outcome(reason=_rendezvous_reason(err, started=agent.started), detail=_first_line(err))
    except Exception as err:  # whatever elastic raises, the agent must hear of it
        return Outcome(reason="error", detail=f"{type(err).__name__}: {_first_line(err)}")
    finally:
        handler.shutdown()
    if result.is_failed():
        ranks = ", ".join(
            f"rank {launch.first_rank + local}: exit code {failure.exitcode}"
            for local, failure in sorted(result.failures.items())
        )
        return Outcome(reason="rank_failed", detail=ranks)
    return Outcome(reason="")


def _rendezvous_reason(err: Exception, *, started: bool) -> str:
    text = str(err).lower()
    if "eaddrinuse" in text or "address already in use" in text:
        return "port_busy"
    return "error" if started else "rendezvous"


def _first_line(err: Exception) -> str:
    lines = str(err).strip().splitlines()
    return lines[0][:1000] if lines else type(err).__name__
