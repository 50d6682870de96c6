"""Which connections an isolated node loses: those to ranks elsewhere, and no other."""

from __future__ import annotations

import pytest

from agents.faults.agent_again import lock_holder
from agents.faults.connections import Connection, parse_connections, rank_connections

EPHEMERAL = range(32768, 61000)
HERE, THERE = "10.0.0.1", "10.0.0.2"

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0 100 0 0 10 0
   1: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 12 1 0 20 4 30 10 -1
   2: 0100007F:C350 0100007F:1F90 06 00000000:00000000 00:00000000 00000000     0        0 0 1 0 20 4 30 10 -1
"""
TABLE_6 = """\
  sl  local_address                         remote_address                        st tx rx tr tm retrnsmt uid t inode
   0: 0000000000000000FFFF00000100007F:C350 0000000000000000FFFF00000100007F:1F90 01 0:0 00:0 0 0 0 13 1 0 20 4 30 10 -1
   1: B80D0120000000000000000001000000:C350 B80D0120000000000000000002000000:C351 01 0:0 00:0 0 0 0 14 1 0 20 4 30 10 -1
"""


def test_reads_standing_connections_of_both_tables() -> None:
    assert parse_connections(TABLE) == [Connection(("127.0.0.1", 8080), ("127.0.0.1", 50000), 12)]
    assert parse_connections(TABLE_6) == [
        Connection(("127.0.0.1", 50000), ("127.0.0.1", 8080), 13),
        Connection(("2001:db8::1", 50000), ("2001:db8::2", 50001), 14),
    ]


@pytest.mark.parametrize(
    ("local_port", "remote_port", "counts"),
    [
        (40000, 50000, True),  # both chosen by the kernel: gloo, NCCL
        (20001, 50000, True),  # a rank elsewhere at our rendezvous
        (40000, 20001, True),  # our rank at the rendezvous elsewhere
        (40000, 443, False),  # storage, or any other service
        (40000, 9000, False),
        (8080, 50000, False),
    ],
)
def test_off_this_machine_ports_tell_ranks_from_services(local_port: int, remote_port: int, counts: bool) -> None:
    connection = Connection((HERE, local_port), (THERE, remote_port), 7)
    found = rank_connections([connection], own={7}, peers=set(), master_port=20001, ephemeral=EPHEMERAL)
    assert found == ([connection] if counts else [])


@pytest.mark.parametrize(("own", "peers", "counts"), [({7}, {8}, True), ({7}, set(), False), ({7, 8}, set(), False)])
def test_on_this_machine_the_other_end_is_looked_up(own: set[int], peers: set[int], counts: bool) -> None:
    ours = Connection((HERE, 40000), (HERE, 50000), 7)
    theirs = Connection((HERE, 50000), (HERE, 40000), 8)
    found = rank_connections([ours, theirs], own=own, peers=peers, master_port=20001, ephemeral=EPHEMERAL)
    assert found == ([ours] if counts else [])


def test_sockets_of_other_processes_are_never_touched() -> None:
    agents_own = Connection((HERE, 40000), (THERE, 50000), 99)
    assert rank_connections([agents_own], own={7}, peers={8}, master_port=20001, ephemeral=EPHEMERAL) == []


def test_finds_who_holds_a_directory() -> None:
    locks = """\
1: POSIX  ADVISORY  WRITE 100 fd:01:4711 0 EOF
2: FLOCK  ADVISORY  WRITE 200 fd:01:4711 0 EOF
2: -> FLOCK  ADVISORY  WRITE 201 fd:01:4711 0 EOF
3: FLOCK  ADVISORY  WRITE 300 fd:01:14711 0 EOF
"""
    assert lock_holder(locks, 4711) == 200
    assert lock_holder(locks, 14711) == 300
    assert lock_holder(locks, 711) is None
