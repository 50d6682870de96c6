"""`everstep demo`: the control plane, agents with simulated GPUs (one of three is a spare), and a real training job.

What it does to the system it does as anybody would: agents join with tokens, the job is submitted through the REST API.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from everstep.cli.client import Client, find_access
from everstep.cli.supervise import Service, StopWanted, Supervisor, SupervisorError
from everstep.cli.up import ControlPlane, add_place_arguments, bring_up, say, supervised
from everstep.errors import EverstepError

AGENTS = 3
TRAINING_NODES = 2
FIRST_PORT, PORTS_PER_NODE = 21000, 300
"""Rendezvous ports of the agents, outside the kernel's ephemeral range."""
JOB_NAME = "tiny-gpt"
PROJECT = Path(__file__).resolve().parents[2]
AGENT_PROGRAM: tuple[str, ...] = (sys.executable, "-m", "agents")
KEEPER_MODULE = "agents.faults.keeper"
AGENT_BACK_OFF_S = 1.0
JOIN_LIMIT_S = 60.0
JOB_STOP_LIMIT_S = 15.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo", help="start everything on this machine, with a training job to break", description=__doc__
    )
    add_place_arguments(parser)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the training job (default: 100000)")
    parser.add_argument(
        "--agents",
        type=int,
        default=AGENTS,
        choices=range(TRAINING_NODES, 10),
        metavar="N",
        help=f"how many agents, each a node of its own: at least {TRAINING_NODES}, without a spare (default: {AGENTS})",
    )
    parser.add_argument("--no-job", action="store_true", help="start server and agents, but submit no job")
    parser.add_argument(
        "script", nargs="*", metavar="ARGUMENT", help="after --: more arguments for examples/train_tiny_gpt.py"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Entry point of `everstep demo`; returns when a stop signal came."""

    nodes = [f"gpu-{number:02}" for number in range(1, args.agents + 1)]

    def work(supervisor: Supervisor, plane: ControlPlane) -> None:
        client: Client | None = None
        try:
            bring_up(supervisor, plane, bootstrap=["--keep-login", "--join", *nodes])
            client = _client(plane.home)
            say(f"Starting agents {', '.join(nodes)} ...")
            supervisor.start(*(_agent(plane, index, name) for index, name in enumerate(nodes)))
            _wait_for(supervisor, partial(_missing_nodes, client, nodes), limit_s=JOIN_LIMIT_S)
            job = None if args.no_job else _find_or_submit_job(client, plane, steps=args.steps, more=args.script)
            say(_welcome(plane, job))
            while True:
                supervisor.pump(1.0)
        except StopWanted:
            say("\nStopping: training first ...")
            raise
        finally:
            with contextlib.suppress(StopWanted):  # asked twice to stop: no more waiting for the job
                if client:
                    _stop_jobs(supervisor, client)
            supervisor.stop()
            _end_processes(plane.home)

    return supervised(args, work)


def _agent(plane: ControlPlane, index: int, name: str) -> Service:
    state = plane.home / "agents" / name
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    first_port = FIRST_PORT + PORTS_PER_NODE * index
    argv = [*AGENT_PROGRAM, "--server", plane.address, "--name", name, "--state", str(state)]
    argv += ["--join-token-file", str(plane.home / "join" / f"{name}.token")]
    argv += ["--simulated-gpus", "1", "--slots", "1", "--rack", "demo", "--stop-runs-on-exit"]
    argv += ["--port-range", f"{first_port}-{first_port + PORTS_PER_NODE - 1}"]
    argv += ["--policy", str(_policy_file(plane.home))]
    return Service(
        name=name,
        argv=argv,
        environment=plane.environment,
        working_directory=plane.home,
        # Drills kill agents: however many in a row, the next one is there before a keeper would start it itself.
        longest_back_off_s=AGENT_BACK_OFF_S,
        stage=2,
    )


def _policy_file(home: Path) -> Path:
    """What the agents may start: this interpreter; as root only where the demo itself runs as root."""
    path = home / "agent-policy.toml"
    path.write_text(
        "# Written by `everstep demo` at each start.\n"
        f"allow_root = {'true' if os.getuid() == 0 else 'false'}\n"
        f"allowed_interpreters = [{json.dumps(sys.executable)}]\n"
        f"allowed_directories = [{json.dumps(str(PROJECT))}, {json.dumps(str(home))}]\n"
    )
    return path


def _wait_for(supervisor: Supervisor, missing: Callable[[], str], *, limit_s: float) -> None:
    limit = time.monotonic() + limit_s
    while words := missing():
        if time.monotonic() > limit:
            raise SupervisorError(f"After {limit_s:.0f} s, {words}; see {supervisor.logs}.")
        supervisor.pump(0.2)


def _client(home: Path) -> Client:
    """With address and token from the file that `manage.py bootstrap` keeps."""
    access = find_access(server=None, token_file=None, environment={"EVERSTEP_HOME": str(home)})
    return Client(access, retries=0)


def _missing_nodes(client: Client, names: Sequence[str]) -> str:
    """An empty string once all agents are connected."""
    try:
        nodes = list(client.pages("nodes", most=len(names)))
    except EverstepError as error:
        return str(error)
    missing = set(names) - {node["name"] for node in nodes if node["connected"]}
    return f"agents are not connected: {', '.join(sorted(missing))}" if missing else ""


def _find_or_submit_job(client: Client, plane: ControlPlane, *, steps: int, more: Sequence[str]) -> dict[str, Any]:
    """A job of an earlier start that still goes on, else a fresh one."""
    for job in _jobs(client):
        say(f"Job {job['name']} of an earlier start goes on.")
        return job
    script = PROJECT / "examples" / "train_tiny_gpt.py"
    spec = {
        "name": JOB_NAME,
        "argv": [sys.executable, str(script), "--steps", str(steps), "--save-every", "25", *more],
        "working_directory": str(PROJECT),
        "environment": {name: os.environ[name] for name in ("EVERSTEP_BEATS",) if name in os.environ},
        "nodes": TRAINING_NODES,
        "ranks_per_node": 1,
        "total_steps": steps,
        "checkpoint_directory": str(plane.home / "checkpoints" / time.strftime("%Y%m%d-%H%M%S")),
    }
    submitted: dict[str, Any] = client.post("jobs", spec)
    return submitted


def _jobs(client: Client) -> list[dict[str, Any]]:
    """Jobs that have not ended."""
    return [job for job in client.pages("jobs", most=50) if job["ended_at"] is None]


def _welcome(plane: ControlPlane, job: dict[str, Any] | None) -> str:
    login = json.loads((plane.home / "login.json").read_text())
    lines = [
        "",
        "Everstep is running.",
        "",
        f"  Open     {plane.address}/",
        f"  Log in   {login['user']}",
        f"  Password {login['password']}",
        "",
    ]
    if job:
        lines += [
            f"  1. Open the job {job['name']}: its loss falls while you watch.",
            "  2. Press 'Trigger drill': one of its two ranks is killed with SIGKILL.",
            "  3. Follow the incident: the rest is stopped, the job goes on from its checkpoint, and a receipt",
            "     proves that the loss continues where it was.",
            "",
        ]
    lines += ["  From a command line here:", "", f"  {_command(plane.home)}", ""]
    return "\n".join([*lines, f"  Logs: {plane.home / 'logs'}   Stop all: Ctrl-C", ""])


def _command(home: Path) -> str:
    """A command that finds this demo from the folder that it was started in: by the `client.json` of its home."""
    is_default = home == Path(".everstep").absolute() and "EVERSTEP_HOME" not in os.environ
    return "everstep job list" if is_default else f"EVERSTEP_HOME={shlex.quote(str(home))} everstep job list"


def _stop_jobs(supervisor: Supervisor, client: Client) -> None:
    """End training in good order, as far as the server still answers; the next start then begins a fresh job."""
    try:
        for job in _jobs(client):
            client.post(f"jobs/{job['id']}/actions", {"kind": "stop"})
        _wait_for(supervisor, lambda: "jobs still run" if _jobs(client) else "", limit_s=JOB_STOP_LIMIT_S)
    except EverstepError as error:
        say(f"Training could not be stopped in good order and is killed. {error}")


def _end_processes(home: Path) -> None:
    """Kill what is left of this home beside the control plane: a demo leaves nothing behind.

    Runners and ranks outlive their agent; a drill's keeper outlives it too, and may have started the agent again.
    """
    for _ in range(50):
        left = _processes_left(home)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _processes_left(home: Path) -> list[int]:
    """Agents and keepers of this home, and processes with a generation's mark whose environment names it."""
    inside = os.fsencode(f"{home}/")
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            marks = (entry / "environ").read_bytes()
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        trains = b"EVERSTEP_MARK=" in marks and inside in marks
        serves = b"--state" in words or KEEPER_MODULE.encode() in words
        if trains or (serves and any(word.startswith(inside + b"agents/") for word in words)):
            found.append(int(entry.name))
    return found
