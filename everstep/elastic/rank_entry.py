"""First thing in each rank: ties its life to the runner's, then becomes the training script.

Torch elastic starts this file as `python -I -S rank_entry.py DIRECTORY`; standard library only, so that it costs
milliseconds. The process id stays the same through exec. Exit code 127: the script's interpreter cannot be started.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(directory: str) -> None:
    die_with_parent()
    release_what_was_inherited()
    with open(os.path.join(directory, "launch.json"), "rb") as file:  # noqa: PTH118, PTH123 - pathlib costs 10 ms
        launch = json.load(file)
    redirect_output(os.path.join(launch["log_directory"], f"rank-{os.environ['RANK']}.log"))  # noqa: PTH118
    try:
        os.chdir(launch["working_directory"])
        os.execvpe(launch["argv"][0], launch["argv"], os.environ)  # noqa: S606 - argv only, no shell
    except OSError as err:
        print(f"Cannot start {launch['argv']!r} in {launch['working_directory']!r}: {err}", file=sys.stderr, flush=True)
        os._exit(127)


def die_with_parent() -> None:
    """SIGKILL for this process when the runner's main thread ends; it survives exec (but no change of user)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        os._exit(126)
    if os.getppid() != int(os.environ["EVERSTEP_RUNNER_PID"]):
        os._exit(126)  # the runner died before the signal was set


def release_what_was_inherited() -> None:
    """Ignored and blocked signals survive exec, and so would any descriptor without close-on-exec."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not None:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.closerange(3, 4096)


def redirect_output(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


if __name__ == "__main__":
    main(sys.argv[1])
