"""`everstep drill run|list|show`: break something on purpose and see whether recovery keeps its promise."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from everstep.cli.client import (
    EXIT_CODES,
    OK,
    REFUSED,
    Client,
    TimeRanOut,
    Unreachable,
    add_access_arguments,
    add_limit_argument,
    client_from,
)
from everstep.cli.incidents import print_entry, print_receipt, receipt_of, timeline
from everstep.cli.output import add_output_argument, ago, clean, moment, print_fields, print_json, print_table

POLL_S = 0.5

OPTIONS = {
    "kind": "--kind",
    "job": "--job",
    "rank": "--rank",
    "node": "--node",
    "duration_s": "--duration",
    "steps_after_save": "--steps-after-save",
    "recovered_within_s": "--within",
}
"""Which option of `run` fills which member of the request."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("drill", help="run, list and show drills", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    run = verbs.add_parser(
        "run",
        help="inject a fault into a running job",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--kind", default="kill-rank", help="what to break (default: kill-rank)")
    run.add_argument("--job", required=True, help="id of the job")
    run.add_argument("--rank", type=int, help="rank to hit, or whose node to hit; default: the last one")
    run.add_argument("--node", help="node to hit, by name")
    run.add_argument(
        "--duration", type=float, metavar="SECONDS", help="how long the fault lasts, where it does; default: by kind"
    )
    run.add_argument(
        "--steps-after-save", type=int, default=0, help="wait until so many steps after a save (default: 0)"
    )
    run.add_argument(
        "--within", type=float, default=120.0, metavar="SECONDS", help="promise: recovered within this (default: 120)"
    )
    run.add_argument(
        "--allow-waiting",
        action="store_true",
        help="also where the job may then have to wait for a human or for the node's return",
    )
    run.add_argument("--wait", action="store_true", help="follow the story to its end; exit 1 if the promise is broken")
    run.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="with --wait: give up after (default: 600)"
    )
    listing = verbs.add_parser("list", help="list drills, newest first")
    listing.add_argument("--job", help="only those of this job")
    add_limit_argument(listing, default=50)
    show = verbs.add_parser("show", help="show one drill")
    show.add_argument("drill", metavar="DRILL", help="id of the drill")
    for verb, handler in ((run, run_drill), (listing, list_drills), (show, show_drill)):
        add_access_arguments(verb)
        add_output_argument(verb)
        verb.set_defaults(run=handler)


def run_drill(args: argparse.Namespace) -> int:
    client = client_from(args)
    drill = client.post(
        "drills",
        {
            "kind": args.kind,
            "job": args.job,
            "rank": args.rank,
            "node": args.node,
            "duration_s": args.duration,
            "allow_waiting": args.allow_waiting,
            "steps_after_save": args.steps_after_save,
            "recovered_within_s": args.within,
        },
        options=OPTIONS,
    )
    as_json = args.output == "json"
    if not as_json:
        lasts = f", for {drill['duration_s']:g} s" if drill["duration_s"] else ""
        print(f"Drill {drill['id']}: {drill['kind']} on {target(drill)}{lasts}.", flush=True)
    if not args.wait:
        if as_json:
            print_json(drill)
        return OK
    drill = follow(client, drill["id"], timeout_s=args.timeout, tell=_silent if as_json else print_entry)
    receipt = receipt_of(client, drill["incident"]) if drill["incident"] else None
    if as_json:
        print_json({"drill": drill, "receipt": receipt})
    else:
        print_outcome(drill, receipt)
    return OK if drill["result"].get("passed") is True else REFUSED


def follow(
    client: Client,
    drill_id: str,
    *,
    timeout_s: float,
    tell: Callable[[dict[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Wait until the drill has ended, telling each entry of its incident's timeline once. Raises `TimeRanOut`.

    A server that does not answer for a while (it may be restarting) is asked again until the time runs out.
    """
    until, seen = clock() + timeout_s, 0
    while True:
        try:
            drill: dict[str, Any] = client.get(f"drills/{drill_id}")
            if drill["incident"]:
                for entry in timeline(client, drill["incident"], after_seq=seen):
                    tell(entry)
                    seen = entry["seq"]
            if drill["ended"]:
                return drill
        except Unreachable as err:
            print(f"everstep: {err} Asking again.", file=sys.stderr)
        if clock() >= until:
            raise TimeRanOut(
                f"Drill {drill_id} has not ended after {timeout_s:g} s; it goes on: everstep drill show {drill_id}"
            )
        sleep(POLL_S)


def target(drill: dict[str, Any]) -> str:
    """What a drill hits, in words."""
    where = f"job {drill['job_name']}, generation {drill['generation']}"
    if not drill["node"]:
        return f"the server under {where}"
    if drill["kind"] == "kill-rank":
        return f"rank {drill['rank']} of {where}, node {drill['node']}"
    return f"node {drill['node']} of {where}"


def promise_words(promise: dict[str, Any]) -> str:
    """What was promised, in words."""
    if promise.get("kind") == "unharmed":
        return "unharmed: no step lost, no event lost, no incident"
    return f"recovered within {promise['recovered_within_s']:g} s, continuity proven"


def _silent(_: dict[str, Any]) -> None:
    """JSON output is one document at the end."""


def print_outcome(drill: dict[str, Any], receipt: dict[str, Any] | None) -> None:
    if receipt is not None:
        print()
        print_receipt(receipt)
    print()
    print(f"Drill {drill['state']}.{' ' + clean(drill['detail']) if drill['detail'] else ''}")
    result = drill["result"]
    if "largest_step_gap_s" in result:
        counts = ", ".join(
            f"{result[name]} {name.replace('_', ' ')}" for name in ("steps_lost", "events_lost", "incidents")
        )
        gap_s, silent_s = result["largest_step_gap_s"], result["silent_s"]
        print(f"  {counts}; silent for {silent_s:.1f} s, longest time without a step {gap_s:.1f} s.")
    for reason in result.get("reasons", ()):
        print(f"  {clean(str(reason))}")


def list_drills(args: argparse.Namespace) -> int:
    drills = list(client_from(args).pages("drills", most=args.limit, job=args.job))
    if args.output == "json":
        print_json(drills)
        return OK
    rows = [
        (
            one["id"],
            one["kind"],
            one["job_name"],
            one["rank"],
            one["node"] or "(server)",
            one["state"],
            ago(one["requested_at"]),
            one["incident"],
        )
        for one in drills
    ]
    print_table(
        ("ID", "KIND", "JOB", "RANK", "NODE", "STATE", "REQUESTED", "INCIDENT"),
        rows,
        empty="There were no drills yet. Run one: everstep drill run --job JOB --wait"
        if args.job is None
        else f"There were no drills on job {args.job}.",
    )
    return OK


def show_drill(args: argparse.Namespace) -> int:
    client = client_from(args)
    drill = client.get(f"drills/{args.drill}")
    if args.output == "json":
        print_json(drill)
        return OK
    print_fields(
        {
            "drill": drill["id"],
            "kind": drill["kind"],
            "job": f"{drill['job_name']} ({drill['job']})",
            "target": target(drill),
            "lasts": f"{drill['duration_s']:g} s" if drill["duration_s"] else None,
            "promise": promise_words(drill["promise"]),
            "requested": f"{moment(drill['requested_at'])} by {drill['requested_by']}",
            "applied": drill["applied_at"] and moment(drill["applied_at"]),
            "undone": drill["undone_at"] and moment(drill["undone_at"]),
            "ended": drill["ended_at"] and moment(drill["ended_at"]),
            "incident": drill["incident"],
        }
    )
    print_outcome(drill, receipt_of(client, drill["incident"]) if drill["incident"] else None)
    return OK
