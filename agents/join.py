"""A join token becomes a credential of this node's own, once; the daemon calls it before it dials."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from agents.durable import read_json, write_json
from agents.errors import JoinRefused, ServerUnreachable, StateUnusable
from agents.settings import Settings

CREDENTIAL_FILE = "credential.json"
_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Credential:
    node: str
    secret: str = field(repr=False)


def stored_credential(settings: Settings) -> Credential | None:
    """Return what an earlier join left. Raises `StateUnusable` if it belongs to another node."""
    path = settings.state_directory / CREDENTIAL_FILE
    value = read_json(path)
    if value is None:
        return None
    if not isinstance(value, dict) or not value.get("node") or not value.get("credential"):
        raise StateUnusable(f"{path} holds no credential. Remove it and start the agent with a join token.")
    if value["node"] != settings.name:
        raise StateUnusable(
            f"{path} belongs to node {value['node']}, but this agent is called {settings.name}. "
            f"Use a state directory for each node."
        )
    return Credential(node=value["node"], secret=value["credential"])


def forget_credential(state_directory: Path) -> None:
    (state_directory / CREDENTIAL_FILE).unlink(missing_ok=True)


def join(settings: Settings) -> Credential:
    """Exchange the join token and store the credential (0600). Blocks up to 10 s.

    Raises `JoinRefused` (an operator must act) or `ServerUnreachable` (try again).
    """
    if settings.join_token is None:
        raise JoinRefused(
            f"Node {settings.name} has no credential and no join token. Create a token on the server and give it "
            f"with --join-token-file or EVERSTEP_JOIN_TOKEN."
        )
    status, answer = _post(settings.join_url, {"token": settings.join_token, "node": settings.name})
    if status == 429 or status >= 500:
        raise ServerUnreachable(f"POST {settings.join_url} was answered with {status}; trying again.")
    if status not in (200, 201):
        said = answer.get("detail") or answer.get("title") or "no reason given"
        raise JoinRefused(
            f"The server refused to let node {settings.name} join ({status}: {said}). "
            f"Create a fresh join token on the server."
        )
    node, secret = answer.get("node"), answer.get("credential")
    if node != settings.name or not isinstance(secret, str) or not secret:
        raise ServerUnreachable(f"POST {settings.join_url} was answered without a credential for {settings.name}.")
    write_json(settings.state_directory / CREDENTIAL_FILE, {"node": node, "credential": secret})
    return Credential(node=settings.name, secret=secret)


def _post(url: str, body: dict[str, str]) -> tuple[int, dict[str, object]]:
    # http.client knows neither proxies nor redirects: a token must reach this server or nobody.
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        raw = response.read(_MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as err:
        raise ServerUnreachable(f"POST {url} got no answer ({err or type(err).__name__}).") from err
    finally:
        connection.close()
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = {}
    return response.status, answer if isinstance(answer, dict) else {}
