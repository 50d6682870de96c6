"""Which TCP connections lead from a generation's ranks on this node to ranks on other nodes, by the kernel's tables.

Pure: what /proc shows is an argument. The keeper of an `isolate-node` drill asks. Stdlib only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Container, Iterable
from dataclasses import dataclass

_ESTABLISHED = 1

Address = tuple[str, int]


@dataclass(frozen=True)
class Connection:
    """One end of an established TCP connection."""

    local: Address
    remote: Address
    inode: int


def parse_connections(table: str) -> list[Connection]:
    """Read the text of /proc/<pid>/net/tcp or tcp6 (proc_pid_net(5)); connections that stand, listeners left out."""
    found = []
    for line in table.splitlines()[1:]:
        words = line.split()
        if int(words[3], 16) == _ESTABLISHED:
            found.append(Connection(_address(words[1]), _address(words[2]), int(words[9])))
    return found


def rank_connections(
    connections: Iterable[Connection],
    *,
    own: Container[int],
    peers: Container[int],
    master_port: int | None,
    ephemeral: range,
) -> list[Connection]:
    """Return this node's ends of connections between its ranks and ranks elsewhere.

    `own` are inodes of sockets of the generation's processes here, `peers` those of its processes under other agents of
    this machine. The other end of a connection that leaves the machine cannot be seen: it counts as a rank's if one of
    the ports is the rendezvous, or if both are the kernel's choice (gloo and NCCL listen on such ports; storage and
    other services do not), given as `ephemeral`.
    """
    everything = list(connections)
    here = {(connection.local, connection.remote): connection.inode for connection in everything}
    found = []
    for connection in everything:
        if connection.inode not in own:
            continue
        other_end = here.get((connection.remote, connection.local))
        ports = (connection.local[1], connection.remote[1])
        if other_end is not None:
            counts = other_end in peers
        else:
            counts = master_port in ports or all(port in ephemeral for port in ports)
        if counts:
            found.append(connection)
    return found


def _address(text: str) -> Address:
    """`0100007F:1F90` is 127.0.0.1:8080: words of four bytes in the machine's order, little-endian where we run."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address), int(port, 16)
