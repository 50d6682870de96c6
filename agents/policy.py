"""What this node allows, whatever the server orders: users, directories, interpreters. Read once from a TOML file."""

from __future__ import annotations

import os
import pwd
import shutil
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from agents.errors import PolicyRefused, PolicyUnreadable
from agents.protocol.messages import LaunchSpec

_KEYS = {
    "allowed_users": list,
    "allowed_directories": list,
    "allowed_interpreters": list,
    "allow_root": bool,
}


@dataclass(frozen=True, kw_only=True)
class Account:
    """Who the ranks run as."""

    name: str
    uid: int
    gid: int
    home: str
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Policy:
    allowed_users: tuple[str, ...] = ()
    """Accounts beside the agent's own."""
    allowed_directories: tuple[Path, ...] = ()
    """Working directories must lie in one of these; none listed: any that exists."""
    allowed_interpreters: tuple[str, ...] = ()
    """Paths or patterns such as /opt/envs/*/bin/python; none listed: any."""
    allow_root: bool = False
    source: str = "a policy file (--policy)"

    def account_for(self, launch: LaunchSpec) -> Account:
        """Return the account of the ranks. Raises `PolicyRefused` with what would have to be set."""
        own = os.geteuid()
        account = _account(own) if not launch.user else _account(launch.user)
        if account.uid != own and account.name not in self.allowed_users:
            raise PolicyRefused(
                f"User {account.name} may not run ranks on this node: add it to allowed_users in {self.source}."
            )
        if account.uid != own and own != 0:
            raise PolicyRefused(
                f"The agent runs as {_account(own).name} and cannot start ranks as {account.name}: "
                f"submit the job without a user, or run the agent as root."
            )
        if account.uid == 0 and not self.allow_root:
            raise PolicyRefused(
                f"No rank runs as root on this node: submit the job with a user that {self.source} lists under "
                f"allowed_users, run the agent as another account, or set allow_root = true there."
            )
        return account

    def check_directory(self, launch: LaunchSpec) -> None:
        """Raises `PolicyRefused` if the working directory, its links followed, is not an allowed one."""
        if not launch.working_directory.startswith("/") or "\0" in launch.working_directory:
            raise PolicyRefused(f"Working directory {launch.working_directory!r} is not absolute: submit it as such.")
        if not self.allowed_directories:
            return
        real = Path(launch.working_directory).resolve()
        if not any(real.is_relative_to(allowed) for allowed in self.allowed_directories):
            raise PolicyRefused(
                f"Working directory {real} is not allowed on this node: add it to allowed_directories in {self.source}."
            )

    def interpreter_for(self, launch: LaunchSpec, *, search_path: str) -> str:
        """Return argv[0] as an absolute path, looked up if it is a bare name. Raises `PolicyRefused`."""
        if not launch.argv or any("\0" in word for word in launch.argv):
            raise PolicyRefused("The job has no command: argv needs an interpreter and a script.")
        interpreter = launch.argv[0]
        if "/" not in interpreter:
            interpreter = shutil.which(interpreter, path=search_path) or interpreter
        if not interpreter.startswith("/"):
            raise PolicyRefused(f"Interpreter {launch.argv[0]!r} is not on this node: submit its absolute path.")
        normal = os.path.normpath(interpreter)
        if self.allowed_interpreters and not any(fnmatchcase(normal, known) for known in self.allowed_interpreters):
            raise PolicyRefused(
                f"Interpreter {normal} is not allowed on this node: add it to allowed_interpreters in {self.source}."
            )
        return normal

    def check_environment(self, launch: LaunchSpec) -> None:
        """Raises `PolicyRefused` for variables that cannot exist."""
        for name, value in launch.environment.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise PolicyRefused(f"Variable {name!r} of the job's environment is malformed: submit it without.")


def load_policy(path: Path | None) -> Policy:
    """Read a policy file, or return the default. Raises `PolicyUnreadable` with the line to change."""
    if path is None:
        return Policy()
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise PolicyUnreadable(f"Policy {path} could not be read: {err}.") from err
    for key, value in values.items():
        if key not in _KEYS:
            raise PolicyUnreadable(f"Policy {path}: {key!r} is unknown; known are {', '.join(sorted(_KEYS))}.")
        if not isinstance(value, _KEYS[key]) or (isinstance(value, list) and not _all_text(value)):
            raise PolicyUnreadable(
                f"Policy {path}: {key} must be {'true or false' if key == 'allow_root' else 'a list of texts'}."
            )
    return Policy(
        allowed_users=tuple(values.get("allowed_users", ())),
        allowed_directories=tuple(Path(text).expanduser().resolve() for text in values.get("allowed_directories", ())),
        allowed_interpreters=tuple(values.get("allowed_interpreters", ())),
        allow_root=values.get("allow_root", False),
        source=str(path),
    )


def _all_text(values: list[object]) -> bool:
    return all(isinstance(value, str) and value for value in values)


def _account(who: str | int) -> Account:
    try:
        entry = pwd.getpwuid(who) if isinstance(who, int) else pwd.getpwnam(who)
    except (KeyError, ValueError) as err:
        if isinstance(who, int):  # a container may run under a number without a name
            return Account(name=str(who), uid=who, gid=os.getegid(), home="/")
        raise PolicyRefused(f"User {who!r} does not exist on this node: create it or submit another.") from err
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid, home=entry.pw_dir, groups=groups)
