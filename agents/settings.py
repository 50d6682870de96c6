"""Settings of one node agent, read once from its command line; every other module takes them as values."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from agents.errors import SettingsInvalid

TOKEN_VARIABLE = "EVERSTEP_JOIN_TOKEN"  # noqa: S105  the variable's name, not a secret

RUNNER_COMMAND = ("-m", "everstep.elastic.runner")


@dataclass(frozen=True, kw_only=True)
class Settings:
    server: str
    """Base address, for example http://127.0.0.1:8400."""
    name: str
    state_directory: Path
    join_token: str | None = field(default=None, repr=False)
    simulated_gpus: int = 0
    slots: int | None = None
    """Ranks that the node takes at once; None means one per GPU, at least one."""
    rack: str = ""
    address: str = "127.0.0.1"
    """Under which other nodes reach this one."""
    port_range: tuple[int, int] = (20000, 20999)
    """First and last port for rendezvous, outside the kernel's ephemeral range."""
    probe_port: int = 22
    """TCP port at which other agents knock when this node is silent; nothing has to listen there."""
    policy_file: Path | None = None
    runner_command: tuple[str, ...] = RUNNER_COMMAND
    """What follows the job's interpreter to start the runner."""
    cgroups: bool = True
    """Use cgroup v2 where it is writable; otherwise runs are found by their mark in /proc."""
    stop_runs_on_exit: bool = False
    """Kill what runs here when the agent is asked to end. Off, training outlives its agent."""
    reconnect_base_s: float = 0.5
    reconnect_cap_s: float = 30.0
    slow_retry_s: float = 60.0
    """Pause after a refusal that only an operator can lift."""
    sample_interval_s: float = 1.0
    verbose: bool = False

    @property
    def socket_url(self) -> str:
        """The websocket of this server's agents."""
        scheme, rest = self.server.split("://", 1)
        return f"{'wss' if scheme == 'https' else 'ws'}://{rest.rstrip('/')}/ws/agent"

    @property
    def join_url(self) -> str:
        return f"{self.server.rstrip('/')}/api/v1/agents/join"


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Read the command line. Raises `SettingsInvalid`; argparse itself ends the process on a wrong option."""
    parser = _parser()
    args = parser.parse_args(argv)
    return Settings(
        server=_server(args.server),
        name=_name(args.name),
        state_directory=Path(args.state).expanduser().absolute(),
        join_token=_token(args.join_token_file, environ),
        simulated_gpus=args.simulated_gpus,
        slots=args.slots,
        rack=args.rack,
        address=args.address,
        port_range=_port_range(args.port_range),
        probe_port=args.probe_port,
        policy_file=Path(args.policy) if args.policy else None,
        cgroups=not args.no_cgroup,
        stop_runs_on_exit=args.stop_runs_on_exit,
        verbose=args.verbose,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="everstep agent",
        description="Node agent of Everstep: senses GPUs and ranks, runs what the server orders. It dials out only.",
    )
    parser.add_argument("--server", required=True, help="address of the server, e.g. http://127.0.0.1:8400")
    parser.add_argument("--name", default=socket.gethostname(), help="name of this node (default: the host name)")
    parser.add_argument("--state", required=True, metavar="DIR", help="directory for what the agent must remember")
    parser.add_argument("--join-token-file", metavar="FILE", help=f"file with the join token (or ${TOKEN_VARIABLE})")
    parser.add_argument("--simulated-gpus", type=_count, default=0, metavar="N", help="pretend to have N GPUs")
    parser.add_argument("--slots", type=_count, metavar="N", help="ranks at once (default: one per GPU)")
    parser.add_argument("--rack", default="", help="rack of this node, for placement")
    parser.add_argument("--address", default="127.0.0.1", help="address under which other nodes reach this one")
    parser.add_argument("--port-range", default="20000-20999", metavar="A-B", help="ports for rendezvous")
    parser.add_argument(
        "--probe-port",
        type=_port,
        default=22,
        metavar="N",
        help="TCP port at which other agents knock when this node is silent (default 22); a refusal is an answer, but "
        "a firewall that drops is none",
    )
    parser.add_argument("--policy", metavar="FILE", help="TOML file with what this node allows")
    parser.add_argument(
        "--no-cgroup", action="store_true", help="find processes by /proc even if cgroups could be used"
    )
    parser.add_argument("--stop-runs-on-exit", action="store_true", help="kill this node's ranks when the agent ends")
    parser.add_argument("--verbose", action="store_true", help="log more")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 1024:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 1024")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is no port")
    return value


def _server(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsInvalid(f"--server {text!r} is no address. Give one like http://127.0.0.1:8400.")
    if parts.username or parts.password:
        raise SettingsInvalid("--server must not hold a password. The agent has a credential of its own.")
    return text.rstrip("/")


def _name(text: str) -> str:
    if not is_safe_name(text):
        raise SettingsInvalid(
            f"--name {text!r} cannot name a node. Use letters, digits, dots, dashes and underscores, at most 100."
        )
    return text


def is_safe_name(text: str) -> bool:
    """Whether a name may become part of a path: it starts with a letter or digit and holds no separator."""
    return (
        0 < len(text) <= 100
        and text.isascii()
        and text[0].isalnum()
        and all(char.isalnum() or char in "._-" for char in text)
    )


def _port_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) <= 65535):
        raise SettingsInvalid(f"--port-range {text!r} is no range. Give one like 20000-20999.")
    return int(first), int(last)


def _token(file: str | None, environ: Mapping[str, str]) -> str | None:
    if file is None:
        return environ.get(TOKEN_VARIABLE) or None
    try:
        token = Path(file).read_text().strip()
    except OSError as err:
        raise SettingsInvalid(f"--join-token-file {file} could not be read: {os.strerror(err.errno or 0)}.") from err
    if not token:
        raise SettingsInvalid(f"--join-token-file {file} is empty. Put the server's join token into it.")
    return token
