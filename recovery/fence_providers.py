"""Fence providers: whoever can switch a node off and say whether it is. `recovery.fencing` asks them.

One real implementation: a command that the site configures, for example around its BMC tool.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Protocol

from django.conf import settings

_OUTPUT_KEPT = 2000
_ADDRESS = re.compile(r"[0-9A-Za-z\[][0-9A-Za-z.:%_\]-]{0,199}")
"""An agent says its own address: it must not be read as an option."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
"""Loaded here, since nothing may be imported between fork and exec."""


@dataclass(frozen=True, kw_only=True)
class FencedNode:
    """What a provider is told of a node."""

    name: str
    address: str


@dataclass(frozen=True, kw_only=True)
class FenceResult:
    """What came of asking a provider. `off` is True only if it says for certain that the node is off."""

    off: bool
    evidence: str
    """One sentence or two: what was asked, and what was answered."""


class FenceProvider(Protocol):
    """Switches nodes off. Neither call raises: what goes wrong is in the result."""

    @property
    def name(self) -> str: ...

    def power_off(self, node: FencedNode) -> FenceResult:
        """Switch the node off, if it is not, and say whether it is now. Safe to repeat."""
        ...

    def status(self, node: FencedNode) -> FenceResult:
        """Say whether the node is off, without a change to it."""
        ...


class CommandFenceProvider:
    """Runs a command of the site with the verb `off` or `status` as its last argument, without a shell.

    In each part of the command `{node}` and `{address}` stand for the node's own. Exit code 0 and `off` as the last
    line of its output say that the node is off; anything else says nothing. What runs for longer than the limit is
    killed with all that it started.
    """

    name = "command"

    def __init__(self, argv: list[str], *, timeout_s: float) -> None:
        self._argv = argv
        self._timeout_s = timeout_s

    def power_off(self, node: FencedNode) -> FenceResult:
        return self._run(node, "off")

    def status(self, node: FencedNode) -> FenceResult:
        return self._run(node, "status")

    def _run(self, node: FencedNode, verb: str) -> FenceResult:
        if not _ADDRESS.fullmatch(node.address) and any("{address}" in part for part in self._argv):
            return FenceResult(off=False, evidence=f"{node.address!r:.100} is no address that a command may be given.")
        argv = [part.replace("{node}", node.name).replace("{address}", node.address) for part in self._argv]
        argv.append(verb)
        asked = f"`{' '.join(argv)}`"
        # Files, not pipes: what the command leaves running would keep a pipe open.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env={name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")},
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            except (OSError, ValueError) as err:
                reason = getattr(err, "strerror", None) or str(err)
                return FenceResult(off=False, evidence=f"{asked} could not be started: {reason}.")
            code = _code_within(process, self._timeout_s)
            said, complaint = _last_line(output.fileno()), _last_line(errors.fileno())
        if code is None:
            return FenceResult(off=False, evidence=f"{asked} did not end within {self._timeout_s:g} s and was killed.")
        evidence = f"{asked} ended with code {code}; the last line of its output was {said!r}."
        if complaint and (code != 0 or said != "off"):
            evidence += f" Its last complaint was {complaint!r}."
        return FenceResult(off=code == 0 and said == "off", evidence=evidence)


def configured_provider() -> FenceProvider | None:
    """The provider that the settings name; None if there is none."""
    argv: list[str] = settings.EVERSTEP_FENCE_COMMAND
    return CommandFenceProvider(argv, timeout_s=settings.EVERSTEP_FENCE_TIMEOUT_S) if argv else None


def _die_with_parent() -> None:
    """In the child: an order to switch a node off must not outlive the worker that watches over it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _code_within(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Its exit code, None if it did not end in time. Whatever is left of its process group is killed."""
    descriptor = os.pidfd_open(process.pid)
    try:
        ended = bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)
        # Before it is waited for: until then nobody else can have its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return code if ended else None


def _last_line(output: int) -> str:
    size = os.fstat(output).st_size
    tail = os.pread(output, _OUTPUT_KEPT, max(0, size - _OUTPUT_KEPT))
    lines = [line.strip() for line in tail.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
