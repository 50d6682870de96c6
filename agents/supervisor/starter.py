"""The last step before the runner: joins the control group, becomes the job's user, then turns into the runner.

A program of its own (`python -I -S starter.py`, order as JSON on stdin), since all of this has to happen in the new
process, where a daemon with threads cannot safely run Python of its own between fork and exec. Stdlib only.
"""

import contextlib
import ctypes
import json
import os
import resource
import sys

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Read the order and never return; stderr is the runner's log.

    It holds cgroup, limit_mark, uid, gid, groups, directory, environment and argv.
    """
    order = json.load(sys.stdin)
    if order["cgroup"] is not None:
        # Written as 0, the kernel takes the writer: no moment in which a child of ours is outside.
        with open(os.path.join(order["cgroup"], "cgroup.procs"), "w") as procs:  # noqa: PTH118, PTH123
            procs.write("0")
    else:
        # Without a group, orphans below the runner come to the runner, where a walk over its descendants finds them.
        # The kernel keeps this over exec.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(ValueError, OSError):  # under a lower hard limit there is no second mark
        resource.setrlimit(resource.RLIMIT_RTTIME, (order["limit_mark"], order["limit_mark"]))
    if order["uid"] != os.geteuid():
        os.setgroups(order["groups"])
        os.setresgid(order["gid"], order["gid"], order["gid"])
        os.setresuid(order["uid"], order["uid"], order["uid"])
    os.chdir(order["directory"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execve(order["argv"][0], order["argv"], order["environment"])  # noqa: S606
    except OSError as err:
        print(f"{order['argv'][0]} could not be started: {err.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
