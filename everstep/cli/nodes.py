"""`everstep node list|show`."""

from __future__ import annotations

import argparse
from typing import Any

from everstep.cli.client import OK, add_access_arguments, client_from
from everstep.cli.output import add_output_argument, ago, duration, moment, print_fields, print_json, print_table, size


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("node", help="list and show nodes", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    listing = verbs.add_parser("list", help="list nodes by name")
    listing.add_argument("--limit", type=int, default=1000, help="at most so many (default: 1000)")
    show = verbs.add_parser("show", help="show one node with its GPUs")
    show.add_argument("node", metavar="NODE", help="name of the node")
    for verb, run in ((listing, list_nodes), (show, show_node)):
        add_access_arguments(verb)
        add_output_argument(verb)
        verb.set_defaults(run=run)


def list_nodes(args: argparse.Namespace) -> int:
    nodes = list(client_from(args).pages("nodes", most=args.limit))
    if args.output == "json":
        print_json(nodes)
        return OK
    rows = [
        (node["name"], node["state"], node["job_name"], gpus(node), ago(node["last_heard_at"]), node["reason"])
        for node in nodes
    ]
    print_table(
        ("NODE", "STATE", "JOB", "GPUS", "LAST HEARD", "REASON"),
        rows,
        empty="No node has joined. Start an agent: everstep agent --server ADDRESS --name NODE --state DIR",
    )
    return OK


def gpus(node: dict[str, Any]) -> str:
    """`8 x H100`, `7 of 8 x H100` where some are missing, `-` for none."""
    seen, expected = node["gpus_seen"], node["gpus_expected"]
    if not seen and not expected:
        return "-"
    count = str(expected) if seen == expected else f"{seen} of {expected}"
    return f"{count} x {node['gpu_model'] or 'GPU'}{' (simulated)' if node['simulated_gpus'] else ''}"


def show_node(args: argparse.Namespace) -> int:
    node = client_from(args).get(f"nodes/{args.node}")
    if args.output == "json":
        print_json(node)
        return OK
    print_fields(
        {
            "node": node["name"],
            "state": node["state"],
            "reason": node["reason"],
            "last heard": ago(node["last_heard_at"]),
            "job": node["job"] and f"{node['job']} ({node['job_name']})",
            "address": node["address"],
            "host": node["hostname"],
            "rack": node["rack"],
            "slots": node["slots"],
            "CPUs": node["cpu_count"],
            "memory": size(node["memory_bytes"]),
            "agent": node["agent_version"],
            "joined": moment(node["joined_at"]),
            "connected": node["connected_since"] and moment(node["connected_since"]),
        }
    )
    rows = [
        (
            gpu["index"],
            gpu["name"],
            measured(gpu["utilization_percent"], "%"),
            f"{size(gpu['memory_used_bytes'])} / {size(gpu['memory_total_bytes'])}",
            measured(gpu["temperature_c"], "C"),
            measured(gpu["power_w"], "W"),
            f"{duration(gpu['age_s'])} ago{' (old)' if gpu['stale'] else ''}",
            gpu["problem"] or None,
        )
        for gpu in node["gpus"]
    ]
    print()
    print_table(
        ("GPU", "MODEL", "USE", "MEMORY", "TEMP", "POWER", "SAMPLED", "PROBLEM"), rows, empty="No GPU was seen here."
    )
    return OK


def measured(value: float | None, unit: str) -> str:
    """`61 C`, or `-` for what is not known."""
    return "-" if value is None else f"{value:.0f} {unit}"
