"""The REST API as the commands call it: address and token found, one request, errors as exceptions with exit codes."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import stat
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode, urlsplit

from everstep.errors import EverstepError

OK, REFUSED, USAGE, NOT_FOUND, UNREACHABLE, TIMEOUT = range(6)
EXIT_CODES = """\
exit codes:
  0  done
  1  refused or failed (also: a drill that did not keep its promise)
  2  wrong usage
  3  not found
  4  server unreachable
  5  time ran out"""

REQUEST_LIMIT_S = 30.0
RETRIES = 4
"""Further attempts after a broken connection; 0.25, 0.5, 1 and 2 s apart."""


class CommandFailed(EverstepError):
    """Ends a command with its own exit code and sentence."""

    exit_code = REFUSED


class WrongUsage(CommandFailed):
    exit_code = USAGE


_USAGE_KINDS = frozenset({"bad_parameter", "unknown_parameter", "validation", "job_refused", "not_confirmed"})
_USAGE_GUARDS = frozenset({"kind", "target", "duration"})
"""Problems and guards of drills that no state of the server would let pass: the command itself has to change."""


class Refused(CommandFailed):
    """The server answered with a problem; `status` is that of HTTP. `wrong_usage`: the command itself is wrong."""

    def __init__(self, message: str, *, status: int, wrong_usage: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.exit_code = NOT_FOUND if status == 404 else USAGE if wrong_usage else REFUSED


class Unreachable(CommandFailed):
    retryable = True
    exit_code = UNREACHABLE


class TimeRanOut(CommandFailed):
    exit_code = TIMEOUT


@dataclass(frozen=True)
class Access:
    """Where the server is and the bearer token for it."""

    server: str
    token: str


def add_access_arguments(parser: argparse.ArgumentParser) -> None:
    """`--server` and `--token-file`. A token itself is never an argument: other users could see it."""
    parser.add_argument("--server", help="address, for example http://127.0.0.1:8400 (else EVERSTEP_SERVER)")
    parser.add_argument("--token-file", type=Path, help="file that holds the API token (else EVERSTEP_TOKEN)")


def find_access(
    *, server: str | None, token_file: Path | None, environment: Mapping[str, str], warnings: IO[str] = sys.stderr
) -> Access:
    """Address and token: arguments first, then the environment, then `client.json` of the home folder.

    `client.json` lies in EVERSTEP_HOME, or in .everstep of the working directory. Raises `WrongUsage`.
    """
    kept_path = Path(environment.get("EVERSTEP_HOME", ".everstep")) / "client.json"
    kept = _kept(kept_path, warnings)
    address = server or environment.get("EVERSTEP_SERVER") or kept.get("server", "")
    if not address:
        raise WrongUsage(f"No server is known: use --server, EVERSTEP_SERVER or {kept_path}.")
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc:
        raise WrongUsage(f"{address!r} is no address of a server: it must be like http://127.0.0.1:8400.")
    address = address.rstrip("/")
    if token_file is not None:
        return Access(address, _read_token(token_file))
    if token := environment.get("EVERSTEP_TOKEN"):
        return Access(address, token.strip())
    if kept.get("token") and kept.get("server", "").rstrip("/") == address:
        return Access(address, kept["token"])
    raise WrongUsage(f"No API token for {address} is known: use --token-file, EVERSTEP_TOKEN or {kept_path}.")


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as err:
        raise WrongUsage(f"The token file {path} cannot be read: {err.strerror}.") from err


def _kept(path: Path, warnings: IO[str]) -> dict[str, str]:
    try:
        text, mode = path.read_text(), path.stat().st_mode
    except FileNotFoundError:
        return {}
    except OSError as err:
        raise WrongUsage(f"{path} cannot be read: {err.strerror}.") from err
    if stat.S_IMODE(mode) & 0o077:
        print(f"everstep: others can read the token in {path}: run chmod 600 {path}", file=warnings)
    try:
        kept = json.loads(text)
        return {name: str(kept[name]) for name in ("server", "token") if name in kept}
    except (ValueError, TypeError) as err:
        raise WrongUsage(f"{path} is no JSON object with server and token: write it anew.") from err


def add_limit_argument(parser: argparse.ArgumentParser, *, default: int) -> None:
    """`--limit` of a list: how many of its items, the first ones, are shown."""
    parser.add_argument("--limit", type=_limit, default=default, help=f"at most so many (default: {default})")


def _limit(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of items: it must be 1 or more")
    return int(text)


class Client:
    """One server, one token. Requests that were answered raise `Refused`; those that were not, `Unreachable`."""

    def __init__(self, access: Access, *, retries: int = RETRIES) -> None:
        self._access = access
        self._retries = retries
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if _is_loopback(access.server):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str, **parameters: object) -> Any:
        """GET `/api/v1/<path>`; parameters that are None are left out."""
        given = {name: _text(value) for name, value in parameters.items() if value is not None}
        return self._send("GET", f"{path}?{urlencode(given)}" if given else path, None)

    def post(self, path: str, body: Mapping[str, object], *, options: Mapping[str, str] | None = None) -> Any:
        """POST with a fresh Idempotency-Key: sent again after a broken connection, it has one effect.

        `options` say which option of the command fills which member of the body (`a/b`: b within a); a refusal then
        names the option.
        """
        return self._send("POST", path, body, key=str(uuid.uuid4()), options=options)

    def pages(self, path: str, *, most: int, **parameters: object) -> Iterator[dict[str, Any]]:
        """The items of a list, page by page, at most `most` of them."""
        cursor, left = None, most
        while left > 0:
            page = self.get(path, limit=min(left, 200), cursor=cursor, **parameters)
            yield from page["items"]
            left -= len(page["items"])
            cursor = page["next"]
            if cursor is None:
                return

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        *,
        key: str = "",
        options: Mapping[str, str] | None = None,
    ) -> Any:
        request = urllib.request.Request(  # noqa: S310  (the scheme was checked by find_access)
            f"{self._access.server}/api/v1/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._access.token}", "Accept": "application/json"},
        )
        if body is not None:
            request.add_header("Content-Type", "application/json")
        if key:
            request.add_header("Idempotency-Key", key)
        for attempt in range(self._retries + 1):
            try:
                with self._opener.open(request, timeout=REQUEST_LIMIT_S) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as err:
                with err:
                    if err.code == 409 and err.headers.get("Retry-After") and attempt < self._retries:
                        time.sleep(min(5.0, float(err.headers["Retry-After"])))
                        continue
                    raise _refusal(err, options or {}) from err
            except (OSError, HTTPException) as err:
                if attempt == self._retries:
                    reason = getattr(err, "reason", None) or err
                    raise Unreachable(f"No answer from {self._access.server}: {reason}. Is the server up?") from err
                time.sleep(0.25 * 2**attempt)
            except ValueError as err:
                raise Unreachable(f"{self._access.server} answered without JSON: is it an Everstep server?") from err
        raise AssertionError("the loop returns or raises")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to another place."""

    def redirect_request(self, *_: object) -> None:
        return None


def client_from(args: argparse.Namespace) -> Client:
    """The client that a command's arguments and the environment name."""
    return Client(find_access(server=args.server, token_file=args.token_file, environment=os.environ))


def _refusal(error: urllib.error.HTTPError, options: Mapping[str, str]) -> CommandFailed:
    try:
        problem = json.load(error)
        detail = str(problem["detail"])
        if wrong := problem.get("errors"):
            detail = "; ".join(f"{_place(one, options)}: {one['detail']}" for one in wrong) + "."
        kind = str(problem["type"]).rpartition("#")[2]
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return Refused(f"The server answered with status {error.code} and no explanation.", status=error.code)
    if error.code >= 500:
        detail = f"{detail} Request {problem.get('instance', 'unknown')}."
    if error.code == 401:
        return Refused("The server does not know this API token: it is wrong, revoked or expired.", status=error.code)
    wrong_usage = kind in _USAGE_KINDS or problem.get("guard") in _USAGE_GUARDS
    return Refused(detail, status=error.code, wrong_usage=wrong_usage)


def _place(wrong: Mapping[str, str], options: Mapping[str, str]) -> str:
    """The option that a server's error is about, for example `--nodes`; else the members' names as words."""
    if "parameter" in wrong:
        return f"--{wrong['parameter']}"
    parts = [part.replace("~1", "/").replace("~0", "~") for part in wrong["pointer"].removeprefix("#").split("/")[1:]]
    for length in range(len(parts), 0, -1):
        option = options.get("/".join(parts[:length]))
        if option is not None:
            return " ".join([option, *parts[length:]])
    return " ".join(parts).replace("_", " ") or "the request"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_loopback(server: str) -> bool:
    host = urlsplit(server).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
