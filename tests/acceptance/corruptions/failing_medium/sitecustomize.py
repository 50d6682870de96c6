"""Storage that fails, as the process that writes checkpoints sees it: Python imports this before anything else there.

The file that CORRUPTIONS_FAULT names says what fails, as one JSON object; nothing does while there is none:

    {"call": "write", "path": "shard-", "errno": 28, "after": 3}     from the 4th on, such writes find no space
    {"call": "fsync", "path": "rank-", "errno": 5, "times": 1}       the first one fails, and no other
    {"call": "rename", "path": "manifest.json$", "kill": true}       the process is killed just before that
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from typing import Any

_real = {name: getattr(os, name) for name in ("write", "fsync", "rename", "mkdir")}
_passed = 0


def _fault() -> dict[str, Any] | None:
    try:
        with open(os.environ["CORRUPTIONS_FAULT"]) as file:
            return json.load(file)
    except (KeyError, OSError, ValueError):
        return None


def _path_of(target: Any) -> str:
    """A file's or a directory's, as a string."""
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)


def _failing(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        global _passed
        fault = _fault()
        if fault is None:
            _passed = 0
        elif fault["call"] == name and re.search(fault["path"], _path_of(args[name == "rename"])):
            _passed += 1
            first = fault.get("after", 0)
            if first < _passed <= first + fault.get("times", 1 << 30):
                if fault.get("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(fault["errno"], os.strerror(fault["errno"]))
        return _real[name](*args, **kwargs)

    return call


if "CORRUPTIONS_FAULT" in os.environ:
    for _name in _real:
        setattr(os, _name, _failing(_name))
