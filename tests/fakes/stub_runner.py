"""A runner and its ranks without torch: keeps the contract of `launch.json`, `events.jsonl` and the ranks' datagrams.

What the ranks do is chosen by the job's environment: STUB_STEPS (end well after that many), STUB_STEP_S (seconds for
each step), STUB_SAVE_EVERY, STUB_KEEP_EVERY (snapshots that it says to keep in memory), STUB_GHOST (a file: a
grandchild that nothing gentle ends writes its process id there), STUB_EXIT (code of rank 0 after three steps),
STUB_MUTE (rank 0 sends nothing, it only logs), STUB_TALK (a directory: ranks 0 and 1 talk to each other over TCP as
`talking_rank` says), STUB_HANG (a file that rank 0 reads after three steps), STUB_STUBBORN (rank 0 ignores SIGTERM and
has a child in a session of its own that does), STUB_PHASES (ranks tell that they save), STUB_LEASE_EXPIRED (after so
many seconds the runner says that its lease ran out, kills its ranks and ends).
"""

import collections
import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import talking_rank

unsent = collections.deque(maxlen=1000)


def main() -> None:
    if sys.argv[1] == "--directory":
        run(Path(sys.argv[2]))
    else:
        rank(Path(sys.argv[2]), int(sys.argv[3]))


def send(launch: dict, **fields: object) -> None:
    """In order, and later if not now, as `everstep.telemetry` does."""
    unsent.append(json.dumps({"job": launch["job"], "generation": launch["generation"], **fields}).encode())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.setblocking(False)
        while unsent:
            sender.sendto(unsent[0], launch["socket"])
            unsent.popleft()


def run(directory: Path) -> None:
    launch = json.loads((directory / "launch.json").read_text())
    events = (directory / "events.jsonl").open("a", buffering=1)

    def tell(kind: str, **fields: object) -> None:
        events.write(json.dumps({"kind": kind, "at": time.time(), **fields}) + "\n")
        send(launch, kind="poke")

    tell("runner_started", pid=os.getpid(), protocol=launch["protocol"])
    ranks = {}
    for number in range(launch["first_rank"], launch["first_rank"] + launch["ranks_per_node"]):
        process = subprocess.Popen(
            [sys.executable, __file__, "--rank", str(directory), str(number)],
            env={**launch["environment"], "EVERSTEP_RUNNER_PID": str(os.getpid())},
            cwd=launch["working_directory"],
            start_new_session=True,
        )
        ranks[os.pidfd_open(process.pid)] = (number, process)
        tell("rank_started", rank=number, pid=process.pid)
    failed = False
    expires_s = float(os.environ.get("STUB_LEASE_EXPIRED", "0")) or None
    while ranks:
        ready = select.select(list(ranks), [], [], expires_s)[0]
        if not ready:
            tell("lease_expired", silent_s=21.25, limit_s=15.0)
            expires_s = None
            for _, process in ranks.values():
                process.kill()
        for descriptor in ready:
            number, process = ranks.pop(descriptor)
            code = process.wait()
            failed = failed or code != 0
            tell(
                "rank_exited",
                rank=number,
                pid=process.pid,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                detail="",
            )
    expired = "STUB_LEASE_EXPIRED" in os.environ and expires_s is None
    tell("runner_ended", reason="lease" if expired else "rank_failed" if failed else "", detail="")


def rank(directory: Path, number: int) -> None:
    launch = json.loads((directory / "launch.json").read_text())
    steps = int(os.environ.get("STUB_STEPS", "1000000"))
    mute = "STUB_MUTE" in os.environ and number == 0
    log = (directory / "logs" / f"rank-{number}.jsonl").open("a", buffering=1)

    def tell(kind: str, **fields: object) -> None:
        line = {"kind": kind, "generation": launch["generation"], "rank": number, "pid": os.getpid(), **fields}
        line["at"] = time.time()
        log.write(json.dumps(line) + "\n")
        if not mute:
            send(launch, **line)

    if "STUB_GHOST" in os.environ and number == 0:
        haunt(Path(os.environ["STUB_GHOST"]))
    if "STUB_TALK" in os.environ:
        role = "connect" if number else "listen"
        talk = (role, Path(os.environ["STUB_TALK"]), f"rank-{number}")
        threading.Thread(target=talking_rank.main, args=talk, daemon=True).start()
    if "STUB_STUBBORN" in os.environ and number == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
    start = launch["parent_step"] or 0
    tell("resumed", step=start, total_steps=steps, deterministic=True, live_digest={"model": "00"})
    for step in range(start + 1, steps + 1):
        time.sleep(float(os.environ.get("STUB_STEP_S", "0.02")))
        tell("step", step=step, loss=1.0 / step, learning_rate=0.1, span_start=step * 4, span_stop=step * 4 + 4)
        if "STUB_HANG" in os.environ and number == 0 and step == start + 3:
            Path(os.environ["STUB_HANG"]).read_bytes()
        if "STUB_PHASES" in os.environ and step % 10 == 0:
            tell("phase", phase="save")
            tell("phase", phase="step")
        if number == 0 and step % int(os.environ.get("STUB_SAVE_EVERY", "20")) == 0:
            save(launch, step)
            tell("saved", step=step, directory="somewhere", size_bytes=1, world_size=launch["world_size"])
        if step % int(os.environ.get("STUB_KEEP_EVERY", "1000000")) == 0:
            tell("kept", step=step, world_size=launch["world_size"], copy_of=None, size_bytes=1, save_time_s=0.1)
        if "STUB_EXIT" in os.environ and number == 0 and step == start + 3:
            os._exit(int(os.environ["STUB_EXIT"]))
    tell("finished", step=steps)


def save(launch: dict, step: int) -> None:
    place = Path(launch["checkpoint_directory"]) / f"generation-{launch['generation']:05d}" / f"step-{step:08d}"
    place.mkdir(parents=True, exist_ok=True)
    said = {"generation": launch["generation"], "step": step, "files": []}
    seal = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    (place / "manifest.json").write_text(json.dumps({**said, "self_sha256": seal}))


def haunt(note: Path) -> None:
    """Leave a grandchild behind: forked twice, in a session of its own, deaf to SIGTERM, with an empty environment."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    os.execve(sys.executable, [sys.executable, "-c", code, str(note)], {})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
