"""`everstep node list|show|maintenance|attest|fence`."""

from __future__ import annotations

import argparse
from typing import Any

from everstep.cli.client import OK, add_access_arguments, add_limit_argument, client_from
from everstep.cli.output import (
    add_output_argument,
    ago,
    clean,
    clock,
    duration,
    moment,
    print_fields,
    print_json,
    print_table,
    size,
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("node", help="list and show nodes; call a silent one off", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    listing = verbs.add_parser("list", help="list nodes by name")
    add_limit_argument(listing, default=1000)
    show = verbs.add_parser("show", help="show one node with its GPUs")
    show.add_argument("node", metavar="NODE", help="name of the node")
    attest = verbs.add_parser(
        "attest",
        help="attest that a silent node is powered off",
        description="Attest that a silent node is powered off. Jobs that wait for a proof of it are relaunched "
        "elsewhere: if the node is on after all, a job runs twice.",
    )
    attest.add_argument("node", metavar="NODE", help="name of the node")
    attest.add_argument("--powered-off", action="store_true", required=True, help="what is attested")
    _add_confirm(attest)
    attest.add_argument("--statement", default="", help="how that is known; kept with the proof")
    fence = verbs.add_parser("fence", help="have the fence provider switch a silent node off")
    fence.add_argument("node", metavar="NODE", help="name of the node")
    _add_confirm(fence)
    maintenance = verbs.add_parser(
        "maintenance", help="give notice that a node will go away: what runs on it saves now"
    )
    maintenance.add_argument("node", metavar="NODE", help="name of the node")
    maintenance.add_argument("--reason", default="maintenance", help="kept with the request")
    runs = (
        (listing, list_nodes),
        (show, show_node),
        (maintenance, announce_maintenance),
        (attest, attest_node),
        (fence, fence_node),
    )
    for verb, run in runs:
        add_access_arguments(verb)
        add_output_argument(verb)
        verb.set_defaults(run=run)


def _add_confirm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--confirm", required=True, metavar="NODE", help="the node's exact name once more")


def list_nodes(args: argparse.Namespace) -> int:
    nodes = list(client_from(args).pages("nodes", most=args.limit))
    if args.output == "json":
        print_json(nodes)
        return OK
    rows = [
        (
            node["name"],
            node["state"],
            node["contact"],
            node["job_name"],
            gpus(node),
            ago(node["last_heard_at"]),
            node["reason"],
        )
        for node in nodes
    ]
    print_table(
        ("NODE", "STATE", "CONTACT", "JOB", "GPUS", "LAST HEARD", "REASON"),
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
            "contact": contact_words(node),
            "last heard": ago(node["last_heard_at"]),
            "quarantine": node["quarantine_reason"],
            "unconfirmed": [share_words(share) for share in node["unconfirmed"]],
            "may run": [share_words(share) for share in node["unproven"]],
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
            "messages lost": node["gaps"] or None,
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
    if node["probes"]:
        print("\nProbes by other nodes")
        for probe in node["probes"]:
            said = f"{probe['outcome'] or 'no answer yet'} {probe['detail']}".strip()
            print(f"  {clock(probe['asked_at'])}  {clean(probe['prober'])}: {clean(said)}")
    if node["fence_actions"]:
        print("\nFences")
        for action in node["fence_actions"]:
            print_fence(action)
    return OK


def contact_words(node: dict[str, Any]) -> str:
    """`seen`; `lost, silent for 42.0 s`."""
    contact: str = node["contact"]
    return f"{contact}, silent for {duration(node['silent_s'])}" if contact in ("suspect", "lost") else contact


def share_words(share: dict[str, Any]) -> str:
    """`generation 2 of llm-7b`, with the kind of proof where others brought one."""
    proof = f" (fenced by {share['proof'].replace('_', ' ')})" if share["proof"] else ""
    return f"generation {share['generation']} of {share['job_name']}{proof}"


def print_fence(action: dict[str, Any]) -> None:
    """One fence action: when, what, by whom, what came of it, and what for."""
    tries = f", attempt {action['attempts']}" if action["attempts"] else ""
    by = clean(action["requested_by"])
    print(f"  {moment(action['requested_at'])}  {action['kind']} by {by}: {action['state']}{tries}")
    if action["evidence"]:
        print(f"    {clean(action['evidence'])}")
    if action["contradicted_at"]:
        print(f"    WRONG: the node was heard again in the same boot at {moment(action['contradicted_at'])}")


def attest_node(args: argparse.Namespace) -> int:
    body = {"confirm": args.confirm, "statement": args.statement}
    action = client_from(args).post(f"nodes/{args.node}/attestations", body)
    if args.output == "json":
        print_json(action)
    else:
        print(f"Attested ({action['id']}): {clean(action['evidence'])}.")
    return OK


def fence_node(args: argparse.Namespace) -> int:
    action = client_from(args).post(f"nodes/{args.node}/fence", {"confirm": args.confirm})
    if args.output == "json":
        print_json(action)
    else:
        print(f"Asked the fence provider ({action['id']}). See what comes of it: everstep node show {args.node}")
    return OK


def measured(value: float | None, unit: str) -> str:
    """`61 C`, or `-` for what is not known."""
    return "-" if value is None else f"{value:.0f} {unit}"


def announce_maintenance(args: argparse.Namespace) -> int:
    asked = client_from(args).post(f"nodes/{args.node}/maintenance", {"reason": args.reason})
    if args.output == "json":
        print_json(asked)
    elif asked["jobs"]:
        print(f"Asked to save now: {', '.join(clean(job) for job in asked['jobs'])}.")
    else:
        print(f"No job runs on {args.node}: there is nothing to save.")
    return OK
