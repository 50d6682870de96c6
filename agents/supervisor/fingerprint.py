"""What a job is on this node, in parts that must agree on all of its nodes before it may run."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.errors import CheckFailed
from agents.policy import Account
from agents.protocol.messages import LaunchSpec

_PROBE_LIMIT_S = 20.0

# Run by the job's interpreter. It imports neither torch nor the job: metadata is read from the installed files.
_PROBE = """
import json, sys
from importlib import metadata, util
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
def protocols():
    try:
        from everstep.elastic import launch
    except ImportError:
        return None
    return [getattr(launch, "OLDEST_PROTOCOL", launch.PROTOCOL), launch.PROTOCOL]
print(json.dumps({
    "python": ".".join(map(str, sys.version_info[:3])), "implementation": sys.implementation.name,
    "torch": version("torch"), "runner": util.find_spec("everstep") is not None, "protocols": protocols(),
}))
"""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """What the job's interpreter says of itself."""

    version: str
    torch: str
    has_runner: bool
    runner_protocols: range
    """Versions of `launch.json` that the runner there understands; empty if that could not be told."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    value: str
    parts: dict[str, str]


async def ask_interpreter(
    interpreter: str, *, account: Account, environment: Mapping[str, str], directory: str, children: set[int]
) -> Interpreter:
    """Start the interpreter once, as the job's user, and list it in `children` meanwhile.

    Raises `CheckFailed` with reason `interpreter`.
    """
    other = account.uid != os.geteuid()
    try:
        process = subprocess.Popen(  # noqa: ASYNC220  returns after exec; the waiting is done by the loop
            [interpreter, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env=dict(environment),
            start_new_session=True,
            user=account.uid if other else None,
            group=account.gid if other else None,
            extra_groups=list(account.groups) if other else None,
        )
    except OSError as err:
        raise CheckFailed(f"{interpreter} could not be started: {err.strerror}.", reason="interpreter") from err
    children.add(process.pid)
    try:
        await _wait(process)
    except TimeoutError as err:
        raise CheckFailed(f"{interpreter} did not answer within {_PROBE_LIMIT_S:.0f} s.", reason="interpreter") from err
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        children.discard(process.pid)
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr:
            # Not to the end of the pipes: a process that the interpreter left behind could hold them open.
            said, complaint = _available(process.stdout.fileno()), _available(process.stderr.fileno())
    try:
        values = json.loads(said)
        return Interpreter(
            version=f"{values['implementation']} {values['python']}",
            torch=str(values["torch"]),
            has_runner=bool(values["runner"]),
            runner_protocols=_protocols(values["protocols"]),
        )
    except (ValueError, TypeError, KeyError) as err:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise CheckFailed(
            f"{interpreter} is no working Python interpreter on this node ({last[:500] or 'it said nothing'}).",
            reason="interpreter",
        ) from err


def take_fingerprint(launch: LaunchSpec, *, interpreter: Interpreter, driver: str) -> Fingerprint:
    """Name what the job is made of here. Values of the environment and arguments appear as hashes only."""
    parts = {
        "argv": _hash(json.dumps(launch.argv).encode()),
        "working directory": launch.working_directory[:300],
        "environment": _hash(json.dumps(sorted(launch.environment.items())).encode()),
        "script": _script_hash(launch),
        "interpreter": interpreter.version,
        "torch": interpreter.torch,
        "GPU driver": driver or "none",
    }
    return Fingerprint(value=_hash(json.dumps(sorted(parts.items())).encode()), parts=parts)


def _protocols(said: Any) -> range:
    if said is None:
        return range(0)
    oldest, newest = said
    return range(int(oldest), int(newest) + 1)


def _script_hash(launch: LaunchSpec) -> str:
    """Hash of the script, the first argument that is no option; `none` for `-m` and `-c`."""
    for word in launch.argv[1:]:
        if word in ("-m", "-c"):
            break
        if not word.startswith("-"):
            with contextlib.suppress(OSError):
                return _hash((Path(launch.working_directory) / word).read_bytes())
            break
    return "none"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


async def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child without a thread. Raises `TimeoutError`."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(_PROBE_LIMIT_S):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _available(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""
