"""`everstep job submit|list|show|stop|checkpoint|absolve`."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everstep.cli.client import OK, WrongUsage, add_access_arguments, add_limit_argument, client_from
from everstep.cli.output import (
    add_output_argument,
    ago,
    duration,
    moment,
    print_fields,
    print_json,
    print_table,
    size,
    steps,
)

PHASES = {
    "setup": "setup, until three steps are done",
    "compile": 'run.phase("compile")',
    "step": "a step",
    "save": "a save",
    "evaluation": 'run.phase("evaluation")',
}

OPTIONS = {
    "name": "--name",
    "argv": "COMMAND",
    "working_directory": "--working-directory",
    "checkpoint_directory": "--checkpoint-dir",
    "environment": "--env",
    "nodes": "--nodes",
    "nodes/multiple_of": "--multiple-of",
    "ranks_per_node": "--ranks-per-node",
    "total_steps": "--total-steps",
    "user": "--user",
    "stop_limit_s": "--stop-limit",
    "save_every": "--save-every",
    "memory_every": "--memory-every",
    "last_good_limit_s": "--last-good-limit",
    **{f"phase_limits_s/{phase}_s": f"--{phase}-limit" for phase in PHASES},
}
"""Which option of `submit` fills which member of the request."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("job", help="submit, list, show and stop training jobs", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_submit(verbs)
    listing = verbs.add_parser("list", help="list jobs, newest first")
    listing.add_argument("--state", help="only those in this state")
    add_limit_argument(listing, default=50)
    _finish(listing, list_jobs)
    show = verbs.add_parser("show", help="show one job with its generations")
    show.add_argument("job", metavar="JOB", help="id of the job")
    _finish(show, show_job)
    stop = verbs.add_parser("stop", help="stop a job: its ranks are killed, and it is not recovered")
    stop.add_argument("job", metavar="JOB", help="id of the job")
    _finish(stop, stop_job)
    checkpoint = verbs.add_parser("checkpoint", help="have a running job save now, at a step that its ranks agree on")
    checkpoint.add_argument("job", metavar="JOB", help="id of the job")
    checkpoint.add_argument("--reason", default="", help="kept with the request")
    _finish(checkpoint, checkpoint_job)
    absolve = verbs.add_parser(
        "absolve",
        help="say that a tainted checkpoint is sound, so that it may be loaded again",
        description="Say that a tainted checkpoint is sound, for example since the script was what had been wrong.",
    )
    absolve.add_argument("job", metavar="JOB", help="id of the job")
    absolve.add_argument("checkpoint", metavar="GENERATION:STEP", help="which one, for example 1:60")
    _finish(absolve, absolve_checkpoint)


def _add_submit(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    submit = verbs.add_parser(
        "submit",
        help="submit a job; what to run follows after --",
        usage="everstep job submit [options] -- python train.py ...",
        description="Submit a job. The command line and the working directory are captured now and used for every "
        "later launch; of the environment, only what --env names.",
    )
    submit.add_argument("--name", help="default: the script's name")
    submit.add_argument(
        "--nodes", default="2", metavar="N|MIN..MAX", help="nodes to train on; a range lets the job shrink (default: 2)"
    )
    submit.add_argument("--multiple-of", type=int, metavar="N", help="of a range, only multiples of this")
    submit.add_argument("--ranks-per-node", type=int, default=1, help="ranks of each node (default: 1)")
    submit.add_argument(
        "--checkpoint-dir", required=True, type=Path, help="folder for checkpoints that every node reaches"
    )
    submit.add_argument("--total-steps", type=int, help="where the job ends; else the script says it")
    submit.add_argument("--working-directory", type=Path, help="default: the present one")
    submit.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    submit.add_argument("--user", default="", help="account to run as; default: the agents' own")
    submit.add_argument("--stop-limit", type=float, default=30.0, metavar="SECONDS", help="default: 30")
    submit.add_argument(
        "--save-every", metavar="N|auto", help="steps between saves, or what costs least; default: as the script says"
    )
    submit.add_argument(
        "--memory-every",
        metavar="N|auto",
        help="steps between snapshots in the nodes' memory, or as often as they cost less than 1 %% of the time; "
        "default: as the script says",
    )
    submit.add_argument(
        "--memory-partner", action="store_true", help="keep each node's snapshots on another node as well"
    )
    submit.add_argument(
        "--last-good-limit",
        type=float,
        metavar="SECONDS",
        help="tell a human when the last good checkpoint is older (default: 3 intervals, or 30 minutes if more)",
    )
    submit.add_argument(
        "--asynchronous", action="store_true", help="ranks finish steps without each other: no lease fences a node"
    )
    for phase in PHASES:
        submit.add_argument(
            f"--{phase}-limit",
            type=float,
            metavar="SECONDS",
            help=f"ranks without contact and without progress are killed after this long in {PHASES[phase]}",
        )
    submit.add_argument("command", nargs="+", metavar="COMMAND", help="interpreter, script and its arguments")
    _finish(submit, submit_job)


def _finish(parser: argparse.ArgumentParser, run: Any) -> None:
    add_access_arguments(parser)
    add_output_argument(parser)
    parser.set_defaults(run=run)


def submit_job(args: argparse.Namespace) -> int:
    job = client_from(args).post("jobs", job_request(args, working_directory=Path.cwd()), options=OPTIONS)
    if args.output == "json":
        print_json(job)
    else:
        print(f"Submitted job {job['id']} ({job['name']}): {job['state']}.")
    return OK


def job_request(args: argparse.Namespace, *, working_directory: Path) -> dict[str, Any]:
    """The body of the request: absolute paths, and an interpreter that is found now. Raises `WrongUsage`."""
    directory = (working_directory / (args.working_directory or "")).resolve()
    optional = {
        "save_every": step_interval(args.save_every, option="--save-every"),
        "memory_every": step_interval(args.memory_every, option="--memory-every"),
        "memory_partner": args.memory_partner or None,
        "last_good_limit_s": args.last_good_limit,
    }
    command: list[str] = args.command
    return {
        "name": args.name or script_name(command),
        "argv": [absolute_program(command[0], directory), *command[1:]],
        "working_directory": str(directory),
        "checkpoint_directory": str((working_directory / args.checkpoint_dir).resolve()),
        "environment": environment_from(args.env),
        "nodes": node_count(args.nodes, multiple_of=args.multiple_of),
        "ranks_per_node": args.ranks_per_node,
        "total_steps": args.total_steps,
        "user": args.user,
        "stop_limit_s": args.stop_limit,
        "synchronous": not args.asynchronous,
        "phase_limits_s": {
            f"{phase}_s": limit_s for phase in PHASES if (limit_s := getattr(args, f"{phase}_limit")) is not None
        },
        **{name: value for name, value in optional.items() if value is not None},
    }


def step_interval(text: str | None, *, option: str) -> int | str | None:
    """A number of steps, or `auto`. Raises `WrongUsage`."""
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError as err:
        raise WrongUsage(f"{option} {text!r} is neither a number of steps nor auto.") from err


def node_count(text: str, *, multiple_of: int | None) -> int | dict[str, int]:
    """`4`, or `2..4` as a range. Raises `WrongUsage`."""
    fewest, dots, most = text.partition("..")
    try:
        if not dots:
            if multiple_of is not None:
                raise WrongUsage(f"--multiple-of goes with a range of nodes, such as --nodes 2..4, not {text!r}.")
            return int(text)
        return {"min": int(fewest), "max": int(most), "multiple_of": 1 if multiple_of is None else multiple_of}
    except ValueError as err:
        raise WrongUsage(f"--nodes {text!r} is neither a number nor a range such as 2..4.") from err


def absolute_program(program: str, directory: Path) -> str:
    """The program's full path, as this shell would find it; symlinks stay, since a virtual environment's python is one.

    Raises `WrongUsage` if there is none: agents run it without a shell and without this PATH.
    """
    found = shutil.which(program if "/" not in program else str(directory / program))
    if found is None:
        raise WrongUsage(f"There is no program {program!r} here: name the interpreter by its full path.")
    return str(Path(found).absolute())


def script_name(command: Sequence[str]) -> str:
    """`train_tiny_gpt` for `python train_tiny_gpt.py ...`; else the program's own name."""
    script = next((word for word in command[1:] if word.endswith(".py")), command[0])
    return Path(script).stem


def environment_from(pairs: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE pairs as a mapping. Raises `WrongUsage`."""
    environment = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise WrongUsage(f"--env {pair!r} is not NAME=VALUE.")
        environment[name] = value
    return environment


def list_jobs(args: argparse.Namespace) -> int:
    jobs = list(client_from(args).pages("jobs", most=args.limit, state=args.state))
    if args.output == "json":
        print_json(jobs)
        return OK
    rows = [
        (job["id"], job["name"], job["state"], job["generation"], steps(job), job["nodes"], ago(job["submitted_at"]))
        for job in jobs
    ]
    print_table(
        ("ID", "NAME", "STATE", "GEN", "STEP", "NODES", "SUBMITTED"),
        rows,
        empty="There are no jobs. Submit one: everstep job submit --checkpoint-dir DIR -- python train.py"
        if args.state is None
        else f"There are no jobs in state {args.state}.",
    )
    return OK


def show_job(args: argparse.Namespace) -> int:
    client = client_from(args)
    job = client.get(f"jobs/{args.job}")
    if args.output == "json":
        print_json(job)
        return OK
    print_job(job, client.get(f"jobs/{args.job}/saving"))
    return OK


def print_job(job: dict[str, Any], saving: dict[str, Any]) -> None:
    checkpoint = job["last_checkpoint"]
    saved = checkpoint and (
        f"step {checkpoint['step']} of generation {checkpoint['generation']}, {size(checkpoint['size_bytes'])}, "
        f"{ago(checkpoint['saved_at'])}, {checkpoint['integrity']}, {checkpoint['health']}"
    )
    print_fields(
        {
            "job": job["id"],
            "name": job["name"],
            "state": job["state"],
            "reason": job["reason"],
            "step": steps(job),
            "generation": job["generation"],
            "nodes": job["nodes"],
            "may shrink to": f"{job['nodes_min']} nodes" if job["nodes_min"] < job["nodes_max"] else None,
            "not in contact": [unseen_words(one) for one in job["unseen"]],
            "open incident": job["open_incident"],
            "last checkpoint": saved,
            "last good": last_good_words(saving["last_good"]),
            "save interval": interval_words(saving["interval"]),
            "saves": f"{saving['saves_failed']} failed, {saving['saves_skipped']} skipped",
            "checkpoint asked for": request_words(saving["request"]),
            "command": " ".join(job["argv"]),
            "working directory": job["working_directory"],
            "checkpoints": job["checkpoint_directory"],
            "owner": job["owner"],
            "submitted": moment(job["submitted_at"]),
            "ended": job["ended_at"] and moment(job["ended_at"]),
        }
    )
    rows = [
        (
            one["number"],
            one["nodes"],
            "the beginning"
            if one["parent_step"] is None
            else f"step {one['parent_step']} of generation {one['parent_generation']}",
            one["reached_step"],
            moment(one["created_at"]),
            one["wanted"],
        )
        for one in job["generations"]
    ]
    print()
    print_table(("GEN", "NODES", "FROM", "REACHED", "PLANNED", "WANTED"), rows, empty="No generation was launched yet.")


def last_good_words(last: dict[str, Any] | None) -> str | None:
    """`4 min 05 s old, TOO OLD (limit 30 min 00 s: the default of 30 minutes)`."""
    if last is None:
        return None
    late = ", TOO OLD" if last["too_old"] else ""
    return f"{duration(last['age_s'])} old{late} (limit {duration(last['limit_s'])}: {last['limit_reason']})"


def interval_words(interval: dict[str, Any]) -> str:
    """What is wanted, and why `auto` is what it is."""
    wanted = interval["wanted"]
    if wanted != "auto":
        return "as the script says" if wanted is None else f"{wanted} steps"
    return f"auto, chosen at each launch. {interval['reason']}"


def request_words(request: dict[str, Any] | None) -> str | None:
    """`12.0 s ago by anna (new cables): saved at step 120`."""
    if request is None:
        return None
    why = f" ({request['reason']})" if request["reason"] else ""
    outcome = "not saved yet" if request["saved_step"] is None else f"saved at step {request['saved_step']}"
    return f"{ago(request['at'])} by {request['by']}{why}: {outcome}"


def unseen_words(one: dict[str, Any]) -> str:
    """`gpu-02 (lost, silent for 42.0 s; its ranks train on)`."""
    trains = "its ranks train on" if one["trains_on"] else "whether its ranks train is not known"
    return f"{one['node']} ({one['contact']}, silent for {duration(one['silent_s'])}; {trains})"


def stop_job(args: argparse.Namespace) -> int:
    job = client_from(args).post(f"jobs/{args.job}/actions", {"kind": "stop"})
    if args.output == "json":
        print_json(job)
    else:
        print(f"Job {job['id']} ({job['name']}) will stop; it is {job['state']} now.")
    return OK


def checkpoint_job(args: argparse.Namespace) -> int:
    job = client_from(args).post(f"jobs/{args.job}/actions", {"kind": "checkpoint", "reason": args.reason})
    if args.output == "json":
        print_json(job)
    else:
        print(f"Job {job['id']} ({job['name']}) will save at the next step that its ranks agree on.")
    return OK


def absolve_checkpoint(args: argparse.Namespace) -> int:
    generation, colon, step = args.checkpoint.partition(":")
    if not colon or not generation.isdecimal() or not step.isdecimal():
        raise WrongUsage(f"{args.checkpoint!r} is no checkpoint: say GENERATION:STEP, for example 1:60.")
    body = {"kind": "absolve", "generation": int(generation), "step": int(step)}
    job = client_from(args).post(f"jobs/{args.job}/actions", body)
    if args.output == "json":
        print_json(job)
    else:
        print(f"Checkpoint {args.checkpoint} of job {job['id']} ({job['name']}) may be loaded again.")
    return OK
