"""What a run of another number of ranks may take over: whatever all ranks held alike, or held parts of.

`reader.py` asks before it loads. What was each rank's own has no heir when there are other ranks: to give everyone rank
0's would go unnoticed and be wrong, so it is refused. The random generators are left out without an error, and `Run`
says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everstep.checkpoint.description import SAME
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.snapshot import RNG
from everstep.errors import UsageError

_NAMED = 3


def check_world_change(
    manifest: Manifest, described: Sequence[Mapping[str, Any]], tracked: Mapping[str, Any], *, world_size: int
) -> None:
    """Raises `UsageError`, naming what it is about, where a state was each rank's own. `described`: all ranks' files.

    Two things that differ between ranks are nobody's own: buffers that DistributedDataParallel copies from rank 0
    before each forward pass, and what a sampler keeps beside its position, which knows what to do with it.
    """
    first = described[0]
    shared_anyway = {part for part, target in tracked.items() if hasattr(target, "commit")} | {RNG}
    parts = {
        part
        for rank_file in described
        for part, said in rank_file["parts"].items()
        if said not in (SAME, first["parts"].get(part))
    }
    paths = {path for rank_file in described for path in rank_file["own_keys"]} - set(first["handed_on"])
    own = parts | {path for path in paths if _part(path) not in parts}
    named = sorted(name for name in own if _part(name) not in shared_anyway)
    if named:
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        raise UsageError(
            f"Cannot resume from checkpoint {manifest.name} of {manifest.world_size} ranks with {world_size}: "
            f"{', '.join(named[:_NAMED])}{more} differed between its ranks, and there is no telling whose the new "
            f"ranks should take. Resume with {manifest.world_size} ranks, or keep it alike on all ranks."
        )


def _part(path: str) -> str:
    return path.split("/", 1)[0]
