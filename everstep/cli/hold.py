"""A drill that holds services of `everstep up` down for a while: the file by which the server asks for it.

`<EVERSTEP_HOME>/hold.json` holds {"drill", "roles", "until", "by"}; the supervisor reads it and removes it at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HOLD_FILE = "hold.json"
MARKER_FILE = "supervised"
"""There while `everstep up` runs, with its process id: only then may the server ask for a hold."""
HOLDABLE = ("web", "worker", "beat")
LONGEST_HOLD_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Hold:
    drill: str
    roles: tuple[str, ...]
    left_s: float
    ends_at: float
    """Monotonic clock."""


def read_hold(path: Path, *, now: float, monotonic: float, say: Callable[[str], None]) -> Hold | None:
    """Return the hold that a file asks for, None if there is none or it is over. `now` is Unix seconds.

    What cannot be followed is removed and said: a drill must not take services down by accident.
    """
    try:
        asked = json.loads(path.read_bytes())
        roles = tuple(asked["roles"])
        left_s = min(float(asked["until"]) - now, LONGEST_HOLD_S)
        if not roles or not set(roles) <= set(HOLDABLE):
            raise ValueError(f"roles are {', '.join(HOLDABLE)}")
        drill = str(asked["drill"])
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        say(f"{path} asks for nothing that can be done ({error!r}) and is removed.")
        path.unlink(missing_ok=True)
        return None
    if not left_s > 0:  # also when it is no number
        path.unlink(missing_ok=True)
        return None
    return Hold(drill=drill, roles=roles, left_s=left_s, ends_at=monotonic + left_s)
