"""`everstep checkpoint list|verify`: what lies in a checkpoint directory, and whether it holds what was saved.

Works on the files alone, without a server, a job or torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from everstep.checkpoint.inventory import Condition, Found, followed, take_inventory
from everstep.checkpoint.lineage import damaged_notes
from everstep.checkpoint.manifest import MANIFEST, CheckpointName, read_manifest
from everstep.checkpoint.origins import Origins
from everstep.checkpoint.retention import pinned_by_server
from everstep.checkpoint.verify import Examination, Fault, examine
from everstep.cli.client import NOT_FOUND, OK, REFUSED, CommandFailed, WrongUsage
from everstep.cli.output import add_output_argument, clean, duration, print_json, print_table, size
from everstep.cli.progress import Progress
from everstep.errors import CheckpointDamaged, CheckpointMissing


class NotThere(CommandFailed):
    exit_code = NOT_FOUND


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("checkpoint", help="list and verify checkpoints on disk", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    listing = verbs.add_parser("list", help="list what lies in a checkpoint directory, by manifests and sizes")
    listing.add_argument("directory", metavar="DIRECTORY", type=Path, help="the job's checkpoint directory")
    listing.add_argument(
        "--run-directory",
        type=Path,
        default=os.environ.get("EVERSTEP_RUN_DIR"),
        help="the run's directory on this node, whose pinned.json names what is kept (else EVERSTEP_RUN_DIR)",
    )
    verifying = verbs.add_parser(
        "verify",
        help="read every byte again and compare it with what was saved",
        description="Read every byte again and compare it with what was saved. Exit code 0 only if all are whole.",
    )
    verifying.add_argument(
        "directory", metavar="DIRECTORY", type=Path, help="the job's checkpoint directory, or that of one checkpoint"
    )
    verifying.add_argument(
        "--checkpoint",
        metavar="GENERATION:STEP",
        action="append",
        default=[],
        help="only this one, like 1:60; may be given more than once (default: all)",
    )
    verifying.add_argument(
        "--from-storage", action="store_true", help="read the medium, and not what this machine has cached of it"
    )
    for verb, run in ((listing, list_checkpoints), (verifying, verify_checkpoints)):
        add_output_argument(verb)
        verb.set_defaults(run=run)


def list_checkpoints(args: argparse.Namespace) -> int:
    root, now = _root(args.directory), time.time()
    run_directory = None if args.run_directory is None else str(args.run_directory)
    inventory = take_inventory(root, now=now, pinned=pinned_by_server(run_directory))
    if inventory.line_problem:
        print(f"everstep: {inventory.line_problem}", file=sys.stderr)
    if args.output == "json":
        print_json([_as_json(one, pins_known=run_directory is not None) for one in inventory.found])
        return OK
    rows = [
        (
            one.name,
            one.condition.value,
            one.manifest and one.manifest.world_size,
            size(one.size_bytes),
            duration(max(0.0, now - one.changed_at)),
            one.on_line,
            one.pinned if run_directory is not None else None,
            one.why or None,
        )
        for one in inventory.found
    ]
    headings = ("CHECKPOINT", "STATE", "WORLD", "SIZE", "AGE", "ON LINE", "PINNED", "WHY")
    print_table(headings, rows, empty=f"There are no checkpoints in {root}.")
    return OK


def verify_checkpoints(args: argparse.Namespace) -> int:
    root, wanted = _wanted(args.directory, args.checkpoint)
    line, line_problem = followed(root)
    names, unfinished = wanted or [], []
    notes: list[str] = []
    if wanted is None:
        inventory = take_inventory(root, now=time.time())
        names = [one.name for one in inventory.found if one.condition is not Condition.UNFINISHED]
        unfinished = [one for one in inventory.found if one.condition is Condition.UNFINISHED]
        notes = damaged_notes(root)
        if not names:
            raise NotThere(f"There is no complete checkpoint in {root}: nothing was verified.")
    progress = Progress(_bytes_of(root, names), stream=sys.stderr)
    origins = Origins(root)
    told = []
    for name in names:
        told.append(_verify(root, name, origins, progress, from_storage=args.from_storage, line=line))
    progress.end()
    if args.output == "json":
        print_json(told)
    else:
        _print_verdicts(told)
        for one in unfinished:
            print(f"\n{one.directory.relative_to(root)} is no checkpoint: {clean(one.why)}.")
    for note in [*notes, *([line_problem] if line_problem and not notes else [])]:
        print(f"everstep: {note}", file=sys.stderr)
    verdicts = {one["verdict"] for one in told}
    if "damaged" in verdicts or notes:
        return REFUSED
    return NOT_FOUND if "missing" in verdicts else OK


def _verify(
    root: Path,
    name: CheckpointName,
    origins: Origins,
    progress: Progress,
    *,
    from_storage: bool,
    line: frozenset[CheckpointName] | None,
) -> dict[str, Any]:
    directory, began = name.directory(root), time.monotonic()
    progress.begin(str(name))
    verdict, examination = "missing", Examination(manifest=None, faults=())
    try:
        examination = examine(directory, from_storage=from_storage, progress=progress.advance)
        verdict = "damaged" if examination.faults else "whole"
    except CheckpointMissing as err:
        examination = Examination(manifest=None, faults=(Fault(kind="manifest", file=MANIFEST, what=str(err)),))
    manifest = examination.manifest
    return {
        "checkpoint": str(name),
        "directory": str(directory),
        "verdict": verdict,
        "on_line": None if line is None or manifest is None else name in line,
        "size_bytes": manifest and manifest.size_bytes,
        "seconds": time.monotonic() - began,
        "faults": [
            {"kind": fault.kind, "file": fault.file, "what": fault.what + _from_where(fault, name, origins)}
            for fault in examination.faults
        ],
    }


def _from_where(fault: Fault, name: CheckpointName, origins: Origins) -> str:
    home = origins.of(fault.found_sha256, besides=(name, fault.file)) if fault.found_sha256 else ""
    return f": here lies {home}, so two saves are mixed" if home else ""


def _print_verdicts(told: Sequence[dict[str, Any]]) -> None:
    rows = [
        (one["checkpoint"], one["verdict"], size(one["size_bytes"]), duration(one["seconds"]), one["on_line"])
        for one in told
    ]
    print_table(("CHECKPOINT", "VERDICT", "SIZE", "TIME", "ON LINE"), rows, empty="")
    for one in told:
        for fault in one["faults"]:
            print(f"\n{one['checkpoint']}: {clean(fault['file'])} {clean(fault['what'])}")
        if one["on_line"] is False:
            print(f"\n{one['checkpoint']} is off the line that training followed: it is never resumed from by itself.")


def _as_json(one: Found, *, pins_known: bool) -> dict[str, Any]:
    manifest = one.manifest
    return {
        "checkpoint": str(one.name),
        "generation": one.name.generation,
        "step": one.name.step,
        "state": one.condition.value,
        "why": one.why,
        "world_size": manifest and manifest.world_size,
        "size_bytes": one.size_bytes,
        "changed_at": datetime.fromtimestamp(one.changed_at, UTC).isoformat(),
        "parent": str(manifest.parent) if manifest and manifest.parent else None,
        "on_line": one.on_line,
        "pinned": one.pinned if pins_known else None,
        "directory": str(one.directory),
    }


def _root(directory: Path) -> Path:
    if not directory.is_dir():
        raise NotThere(f"There is no directory {directory} here, or nothing in it can be read.")
    return directory.absolute()


def _wanted(directory: Path, chosen: Sequence[str]) -> tuple[Path, list[CheckpointName] | None]:
    """The checkpoint directory, and which of its checkpoints; None for all."""
    root = _root(directory)
    try:
        names = [CheckpointName.parse(text) for text in chosen]
    except CheckpointMissing as err:
        raise WrongUsage(str(err)) from err
    one = CheckpointName.of_place(root)
    if one is None:
        return root, names or None
    if names:
        raise WrongUsage(f"{directory} is one checkpoint already: leave --checkpoint out, or name the directory above.")
    return root.parent.parent, [one]


def _bytes_of(root: Path, names: Sequence[CheckpointName]) -> int:
    total = 0
    for name in names:
        try:
            total += read_manifest(name.directory(root)).size_bytes
        except (CheckpointDamaged, CheckpointMissing):
            continue
    return total
