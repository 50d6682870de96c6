"""Make a fresh installation usable: an operator to log in as, an API token, join tokens for agents.

`everstep up` and `everstep demo` run it at each start, so that it changes nothing that is in order already.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from django.contrib.auth import authenticate
from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandParser

from dashboard.env import env
from recovery.access import create_api_token, create_join_token, user_for_api_token
from recovery.models import JoinToken


class Command(BaseCommand):
    help = "Create the operator, an API token and join tokens, as far as they are missing."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--user", default="operator", help="log-in name of the operator (default: operator)")
        parser.add_argument("--password", default="", help="the operator's password; random if not given")
        parser.add_argument("--server", default="", help="address to write beside the API token")
        parser.add_argument(
            "--keep-login", action="store_true", help="keep user and password in login.json (mode 0600), for a demo"
        )
        parser.add_argument("--join", nargs="*", default=[], metavar="NODE", help="nodes to make join tokens for")

    def handle(self, *_: Any, **options: Any) -> None:
        user, password = self._operator(options["user"], options["password"], keep=options["keep_login"])
        if password:
            self.stdout.write(f"Log in as {user.get_username()} with password {password}")
        if options["server"]:
            _client_file(user, options["server"])
        for node in options["join"]:
            _join_file(node)

    def _operator(self, name: str, wanted: str, *, keep: bool) -> tuple[User, str]:
        """The operator, and the password if it is to be told: it is new, or kept in the login file."""
        path = env.home / "login.json"
        kept = _read(path) if keep else {}
        user = User.objects.filter(username=name).first()
        if user is not None and not wanted:
            if not keep:
                return user, ""
            known = str(kept.get("password", ""))
            if kept.get("user") == name and authenticate(username=name, password=known) is not None:
                return user, known
        password = wanted or secrets.token_urlsafe(12)
        user = user or User(username=name)
        user.is_staff = user.is_superuser = True
        user.set_password(password)
        user.save()
        if keep:
            _write_private(path, {"user": name, "password": password})
        return user, password


def _client_file(user: User, server: str) -> None:
    """Address and API token for the command line, in client.json of the home folder."""
    path = env.home / "client.json"
    known = str(_read(path).get("token", ""))
    token = known if known and user_for_api_token(known) else create_api_token(user=user, name="command line")
    _write_private(path, {"server": server, "token": token})


def _join_file(node: str) -> None:
    """A join token for one node in `join/<node>.token`; an unused one of before is revoked."""
    JoinToken.objects.filter(node_name=node, uses_left__gt=0).update(revoked=True)
    _write_private_text(env.home / "join" / f"{node}.token", create_join_token(node_name=node))


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_private(path: Path, value: dict[str, str]) -> None:
    _write_private_text(path, json.dumps(value, indent=1) + "\n")


def _write_private_text(path: Path, text: str) -> None:
    """Replace a file by one that only its owner can read, without a moment in which it is neither old nor new."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    fresh.replace(path)
