"""`everstep incident list|show|rearm`: what broke, what was done about it, and whether training really goes on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from everstep.cli.client import OK, Client, Refused, add_access_arguments, add_limit_argument, client_from
from everstep.cli.output import (
    add_output_argument,
    ago,
    cell,
    clean,
    clock,
    duration,
    moment,
    paint,
    print_fields,
    print_json,
    print_table,
    tone_of,
    wants_colour,
)

MARKS = {"fault": "!", "page": "!", "receipt": "=", "state": ">", "proof": "+", "drill": "*", "operator": "@"}
"""One mark per kind of entry, so that faults and pages are found without colour; `-` for the others."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("incident", help="list and show incidents; re-arm the breaker", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    listing = verbs.add_parser("list", help="list incidents, newest first")
    which = listing.add_mutually_exclusive_group()
    which.add_argument("--open", dest="ended", action="store_false", default=None, help="only those that are open")
    which.add_argument("--ended", dest="ended", action="store_true", default=None, help="only those that have ended")
    listing.add_argument("--job", help="only those of this job")
    add_limit_argument(listing, default=50)
    show = verbs.add_parser("show", help="show one incident: phases, timeline, receipt")
    show.add_argument("incident", metavar="INCIDENT", help="id of the incident")
    rearm = verbs.add_parser("rearm", help="believe in silence again, after an incident of the control plane")
    rearm.add_argument("incident", metavar="INCIDENT", help="id of the incident")
    for verb, run in ((listing, list_incidents), (show, show_incident), (rearm, rearm_breaker)):
        add_access_arguments(verb)
        add_output_argument(verb)
        verb.set_defaults(run=run)


def list_incidents(args: argparse.Namespace) -> int:
    incidents = list(client_from(args).pages("incidents", most=args.limit, ended=args.ended, job=args.job))
    if args.output == "json":
        print_json(incidents)
        return OK
    rows = [
        (
            one["id"],
            one["job_name"] or "(control plane)",
            one["state"],
            one["verdict"],
            f"{ago(one['opened_at'])}{' (drill)' if one['drill'] else ''}",
            one["cause_sentence"] or None,
        )
        for one in incidents
    ]
    print_table(("ID", "JOB", "STATE", "CONTINUITY", "OPENED", "CAUSE"), rows, empty="There are no such incidents.")
    return OK


def show_incident(args: argparse.Namespace) -> int:
    client = client_from(args)
    incident = client.get(f"incidents/{args.incident}")
    entries = list(timeline(client, args.incident))
    if args.output == "json":
        print_json({**incident, "timeline": entries})
        return OK
    print_incident(incident)
    print("\nTimeline")
    for entry in entries:
        print_entry(entry)
    if incident["receipt"] is not None:
        print()
        print_receipt(incident["receipt"])
    return OK


def timeline(client: Client, incident: str, *, after_seq: int = 0) -> Iterator[dict[str, Any]]:
    """The entries after `after_seq`, in order."""
    while True:
        part = client.get(f"incidents/{incident}/timeline", after_seq=after_seq)
        yield from part["items"]
        if not part["items"] or part["items"][-1]["seq"] >= part["last_seq"]:
            return
        after_seq = part["items"][-1]["seq"]


def print_incident(incident: Mapping[str, Any]) -> None:
    of_job = incident["kind"] == "job"
    print_fields(
        {
            "incident": incident["id"],
            "state": incident["state"] + (" - a human is needed" if incident["needs_human"] else ""),
            "why": incident["escalation"],
            "job": f"{incident['job_name']} ({incident['job']})" if of_job else None,
            "cause": incident["cause_sentence"],
            "nodes": incident["nodes"],
            "still silent": incident["still_silent"],
            "drill": incident["drill"],
            "opened": f"{moment(incident['opened_at'])}, {ago(incident['opened_at'])}",
            "broken generation": incident["broken_generation"],
            "reached step": incident["reached_step"],
            "new generation": incident["generation"],
            "attempts": incident["attempt"] or None,
        }
    )
    if not of_job and not incident["ended"]:
        print(f"\nOnce you have looked: everstep incident rearm {incident['id']}")
    if incident["waiting_for"]:
        print("\nWaiting for proof that the old generation is gone from")
        for one in incident["waiting_for"]:
            print(f"  {clean(one['node'])}, generation {one['generation']}, {contact_words(one)}: {help_words(one)}")
    if incident["fences"]:
        print("\nFences")
        for proof in incident["fences"]:
            kind = proof["kind"].replace("_", " ")
            where = f"{clean(proof['node'])}, generation {proof['generation']}"
            print(f"  {clock(proof['at'])} + {where}: {kind} - {clean(proof['evidence'])}")
    if incident["phases"]:
        print("\nPhases")
        for phase in incident["phases"]:
            going = "" if phase["ended_at"] else " so far"
            over = f" - over its limit of {duration(phase['limit_s'])}" if phase["over_limit"] else ""
            print(f"  {clock(phase['started_at'])}  {phase['state']:<22} {duration(phase['seconds'])}{going}{over}")


def contact_words(one: Mapping[str, Any]) -> str:
    """`in contact`; `silent for 42.0 s`; `nobody listens`."""
    if one["contact"] in ("suspect", "lost"):
        return f"silent for {duration(one['silent_s'])}"
    return "in contact" if one["contact"] == "seen" else "nobody listens"


def help_words(one: Mapping[str, Any]) -> str:
    """What would bring the missing proof."""
    words = {
        "stop": "its agent stops what is left",
        "lease": f"its lease ends at {clock(one['lease_ends_at'])}" if one["lease_ends_at"] else "its lease ends",
        "return": "it comes back or reboots",
        "provider": f"everstep node fence {one['node']} --confirm {one['node']}",
        "attestation": f"everstep node attest {one['node']} --powered-off --confirm {one['node']}",
    }
    said = "; or ".join(words.get(kind, kind) for kind in one["helps"])
    return f"{said} (fence {one['fence_action']})" if one["fence_action"] else said


def rearm_breaker(args: argparse.Namespace) -> int:
    incident = client_from(args).post(f"incidents/{args.incident}/actions", {"kind": "rearm"})
    if args.output == "json":
        print_json(incident)
    else:
        print(f"Re-armed the breaker: incident {incident['id']} is {incident['state']}.")
    return OK


def print_entry(entry: Mapping[str, Any]) -> None:
    colour = wants_colour(sys.stdout)
    line = f"  {clock(entry['occurred_at'])} {MARKS.get(entry['kind'], '-')} {clean(entry['text'])}"
    tone = {"fault": "bad", "page": "bad", "receipt": "good", "proof": "good"}.get(entry["kind"])
    print(line if tone is None else paint(line, tone, colour=colour), flush=True)


def print_receipt(receipt: Mapping[str, Any]) -> None:
    """The verdict first, then the numbers that it stands on; seconds are counted from the fault."""
    verdict = receipt["verdict"]
    tone = tone_of(verdict["kind"])
    headline = f"Receipt: {receipt['state']}, continuity {verdict['kind']}"
    print(headline if tone is None else paint(headline, tone, colour=wants_colour(sys.stdout)))
    for finding in verdict["findings"]:
        print(f"  {clean(finding)}")
    parent = receipt["parent"]
    fields = {
        "generation": f"{receipt['broken_generation']} -> {receipt['generation']}",
        "nodes": f"{cell(receipt['old_nodes'])} -> {cell(receipt['new_nodes'])}",
        "resumed from": "the beginning"
        if parent is None
        else f"step {parent['step']} of generation {parent['generation']}"
        + (", from its nodes' memory" if receipt.get("parent_in_memory") else ""),
        "reached before the fault": receipt["reached_step"],
        "steps lost": verdict["steps_lost"],
        "steps compared": verdict["steps_compared"],
        "detected after": duration(receipt["detect_s"]),
        "old ranks proven dead after": duration(receipt["stop_s"]),
        "launched after": duration(receipt["launch_s"]),
        "first step on all ranks after": duration(receipt["first_step_s"]),
        "caught up after": duration(receipt["caught_up_s"]),
        "whole incident": duration(receipt["total_s"]),
        "attempts": receipt["attempts"],
    }
    if samples := receipt.get("samples"):
        fields["samples"] = clean(samples["sentence"])
    print_fields({f"  {name}": value for name, value in fields.items()})


def receipt_of(client: Client, incident: str) -> dict[str, Any] | None:
    """The receipt, or None if the incident ended without one."""
    try:
        receipt: dict[str, Any] = client.get(f"incidents/{incident}/receipt")
    except Refused as err:
        if err.status == 404:
            return None
        raise
    return receipt
