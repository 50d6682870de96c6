"""Makes TCP sockets of a generation's ranks deaf to ranks on other nodes, and lets them hear again.

The keeper of an `isolate-node` drill takes duplicates of the sockets (pidfd_getfd(2)) and attaches a filter that drops
all that arrives, acknowledgements too: a socket then sends no more than what its window held, and waits. The ranks run
on and see what they would see if a switch had died. Duplicates are held until the end, so that even the death of a rank
sends no farewell. UDP, Unix sockets and the agent's are never touched. Stdlib only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from agents.faults.connections import Connection, parse_connections, rank_connections
from agents.faults.generation_processes import generation_processes
from agents.faults.kept_fault import KeptFault, ProcessName
from agents.supervisor.process_table import MARK_VARIABLE, all_processes, open_exact

_SYS_PIDFD_GETFD = 438
"""The same number on all architectures that we know (Linux 5.6)."""
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""One instruction of classic BPF: `ret #0` (linux/filter.h, struct sock_filter)."""
_INFINIBAND = "/dev/infiniband/"

_libc = ctypes.CDLL(None, use_errno=True)


class CannotIsolate(Exception):
    """The ranks here cannot be cut from the others; the text says why, as a sentence."""


class DeafSockets:
    """The sockets of one drill. `close` gives the duplicates back and leaves the filters as they are."""

    def __init__(self, fault: KeptFault) -> None:
        self._fault = fault
        self._held: dict[int, socket.socket] = {}

    def find(self) -> dict[int, tuple[ProcessName, int]]:
        """Connections to ranks elsewhere that still hear: inode to a process that has it, and its descriptor there.

        Raises `CannotIsolate` when the ranks talk by other means than TCP.
        """
        processes = [ProcessName(process.pid, process.start_time) for process in generation_processes(self._fault)]
        own: dict[int, tuple[ProcessName, int]] = {}
        for name in processes:
            for descriptor, target in _descriptors(name.pid):
                if target.startswith(_INFINIBAND):
                    raise CannotIsolate(
                        f"Process {name.pid} talks through {target}, which a socket filter cannot cut: "
                        f"choose a job that uses TCP, or pull the cable."
                    )
                if (inode := _inode(target)) is not None:
                    own.setdefault(inode, (name, descriptor))
        connections = rank_connections(
            _connections(processes),
            own=own,
            peers=self._peer_inodes(),
            master_port=self._fault.master_port,
            ephemeral=_ephemeral_ports(),
        )
        return {
            connection.inode: own[connection.inode] for connection in connections if connection.inode not in self._held
        }

    def take(self, found: dict[int, tuple[ProcessName, int]]) -> int:
        """Hold duplicates of these sockets; returns how many there still were. Raises `CannotIsolate`."""
        taken = 0
        for inode, (name, descriptor) in found.items():
            try:
                duplicate = _duplicate(name, descriptor)
            except PermissionError as err:
                raise CannotIsolate(
                    f"The kernel does not hand out sockets of process {name.pid} ({err.strerror}): "
                    f"run the agent as root or with CAP_SYS_PTRACE."
                ) from err
            if duplicate is None:
                continue
            if os.fstat(duplicate).st_ino != inode:  # closed and used anew since we looked
                os.close(duplicate)
                continue
            self._held[inode] = socket.socket(fileno=duplicate)
            taken += 1
        return taken

    def deafen(self, inodes: Iterable[int]) -> None:
        """Attach the filter to sockets that are held. Raises `CannotIsolate`; those before it stay deaf."""
        program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        filter_program = struct.pack("HP", 1, ctypes.addressof(program))
        for inode in inodes:
            if inode in self._held:
                try:
                    self._held[inode].setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_program)
                except OSError as err:
                    raise CannotIsolate(f"The kernel refuses a filter on a rank's socket ({err.strerror}).") from err

    def hear_again(self, inodes: Iterable[int]) -> int:
        """Detach the filter from these sockets, also from those that an earlier keeper made deaf; returns how many."""
        wanted = set(inodes)
        for process in generation_processes(self._fault):
            for descriptor, target in _descriptors(process.pid):
                inode = _inode(target)
                if inode in wanted and inode not in self._held:
                    with contextlib.suppress(CannotIsolate):
                        self.take({inode: (ProcessName(process.pid, process.start_time), descriptor)})
        restored = 0
        for inode in wanted & set(self._held):
            with contextlib.suppress(OSError):  # ENOENT: it never got the filter
                self._held[inode].setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                restored += 1
        return restored

    def close(self) -> None:
        for held in self._held.values():
            held.close()
        self._held.clear()

    def _peer_inodes(self) -> set[int]:
        """Sockets of ranks of the same generation that other agents of this machine run."""
        own_mark = self._fault.mark.encode()
        generation = f"{self._fault.job}:{self._fault.generation}:".encode()
        found: set[int] = set()
        for process in all_processes().values():
            mark = _mark(process.pid)
            if mark is not None and mark != own_mark and mark.startswith(generation):
                found.update(inode for _, target in _descriptors(process.pid) if (inode := _inode(target)) is not None)
        return found


def _connections(processes: Iterable[ProcessName]) -> list[Connection]:
    """What the network namespace of the ranks shows."""
    for name in processes:
        with contextlib.suppress(OSError):
            net = Path("/proc") / str(name.pid) / "net"
            tables = [net / "tcp", net / "tcp6"]
            return [found for table in tables if table.exists() for found in parse_connections(table.read_text())]
    return []


def _descriptors(pid: int) -> Iterator[tuple[int, str]]:
    """Open descriptors of a process and what they lead to, as /proc shows it."""
    directory = Path("/proc") / str(pid) / "fd"
    try:
        numbers = [entry.name for entry in directory.iterdir()]
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            yield int(number), str((directory / number).readlink())


def _inode(target: str) -> int | None:
    return int(target[8:-1]) if target.startswith("socket:[") else None


def _mark(pid: int) -> bytes | None:
    prefix = f"{MARK_VARIABLE}=".encode()
    with contextlib.suppress(OSError):
        for entry in (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0"):
            if entry.startswith(prefix):
                return entry.removeprefix(prefix)
    return None


def _ephemeral_ports() -> range:
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(low), int(high) + 1)


def _duplicate(name: ProcessName, descriptor: int) -> int | None:
    """A duplicate of another process's descriptor; None if process or descriptor are gone. Raises `PermissionError`."""
    process = open_exact(name.pid, name.start_time)
    if process is None:
        return None
    try:
        duplicate = int(_libc.syscall(_SYS_PIDFD_GETFD, process, descriptor, 0))
        number = ctypes.get_errno()
    finally:
        os.close(process)
    if duplicate >= 0:
        return duplicate
    if number in (errno.EPERM, errno.ENOSYS):
        raise PermissionError(number, os.strerror(number))
    return None
