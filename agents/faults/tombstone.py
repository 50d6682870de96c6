"""`<state>/down-until`: while it is valid, this node's agent stays down, as if the node had lost it.

The keeper of a `kill-agent` drill writes it just before the fault and removes it at the limit. The agent asks for it
before anything else it does. Stdlib only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from agents.boot_clock import SECOND_NS, boottime_ns, this_boot
from agents.durable import read_json, write_json
from agents.errors import StateUnusable
from agents.faults.kept_fault import LONGEST_FAULT_S
from agents.log_lines import NodeLog

log = NodeLog(__name__)

_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Tombstone:
    until_boottime_ns: int
    drill: str
    boot_id: str

    def left_s(self, *, now_ns: int, boot_id: str) -> float:
        """Seconds for which it still holds the agent down; 0 if it is past, of another boot, or too long to be true."""
        left_s = (self.until_boottime_ns - now_ns) / SECOND_NS
        return left_s if self.boot_id == boot_id and 0 < left_s <= LONGEST_FAULT_S else 0.0


def tombstone_path(state_directory: Path) -> Path:
    return state_directory / "down-until"


def write_tombstone(state_directory: Path, tombstone: Tombstone) -> None:
    """On disk when this returns. Raises `StateUnusable`."""
    write_json(tombstone_path(state_directory), vars(tombstone))


def remove_tombstone(state_directory: Path) -> None:
    tombstone_path(state_directory).unlink(missing_ok=True)


def read_tombstone(state_directory: Path) -> Tombstone | None:
    """None if there is none, or one that cannot be read: a drill must not keep an agent down by accident."""
    try:
        value = read_json(tombstone_path(state_directory))
        if value is None:
            return None
        return Tombstone(
            until_boottime_ns=int(value["until_boottime_ns"]), drill=str(value["drill"]), boot_id=str(value["boot_id"])
        )
    except (StateUnusable, KeyError, TypeError, ValueError) as err:
        log.warning("a drill's tombstone cannot be read and does not count", error=err)
        return None


def wait_while_down(state_directory: Path) -> None:
    """Block until no tombstone holds this node's agent down. Touches nothing; a signal ends the process as usual."""
    told = False
    while (found := read_tombstone(state_directory)) is not None:
        left_s = found.left_s(now_ns=boottime_ns(), boot_id=this_boot())
        if not left_s:
            return
        if not told:
            log.warning("a drill keeps this agent down", drill=found.drill, for_s=round(left_s, 1))
            told = True
        time.sleep(min(left_s, _LOOK_EVERY_S))
