"""Every environment variable that the server reads, in one place, with its default and meaning."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path


class Environment:
    """The server's configuration, read once at import of the settings."""

    def __init__(self, variables: dict[str, str] | None = None) -> None:
        self._variables = dict(os.environ) if variables is None else variables

    @property
    def home(self) -> Path:
        """EVERSTEP_HOME: where the embedded defaults keep their files."""
        return Path(self._variables.get("EVERSTEP_HOME", ".everstep")).absolute()

    @property
    def secret_key(self) -> str:
        """EVERSTEP_SECRET_KEY, else a key made once and kept in the home folder with mode 0600."""
        if key := self._variables.get("EVERSTEP_SECRET_KEY"):
            return key
        return _kept_secret(self.home / "secret_key")

    @property
    def debug(self) -> bool:
        return self._variables.get("EVERSTEP_DEBUG", "") == "1"

    @property
    def allowed_hosts(self) -> list[str]:
        """EVERSTEP_ALLOWED_HOSTS: comma-separated, beside loopback, at which `everstep up` and the demo ask."""
        named = self._variables.get("EVERSTEP_ALLOWED_HOSTS", "").split(",")
        return ["127.0.0.1", "localhost", "[::1]", *(host.strip() for host in named if host.strip())]

    @property
    def database_url(self) -> str:
        """EVERSTEP_DATABASE_URL: postgresql://user:password@host:port/name?sslmode=verify-full, with what libpq knows.

        Empty means SQLite in the home folder.
        """
        return self._variables.get("EVERSTEP_DATABASE_URL", "")

    @property
    def redis_url(self) -> str:
        """EVERSTEP_REDIS_URL: redis://, rediss:// or unix:///path; by default the embedded broker's socket."""
        return self._variables.get("EVERSTEP_REDIS_URL", f"unix://{self.home / 'run' / 'broker.sock'}")

    @property
    def suspect_after_s(self) -> float:
        """EVERSTEP_SUSPECT_AFTER_S: silence after which a node is suspect; it costs it nothing yet."""
        return float(self._variables.get("EVERSTEP_SUSPECT_AFTER_S", "3"))

    @property
    def lost_after_s(self) -> float:
        """EVERSTEP_LOST_AFTER_S: silence after which a node counts as lost, which is one witness of two."""
        return float(self._variables.get("EVERSTEP_LOST_AFTER_S", "10"))

    @property
    def fence_command(self) -> list[str]:
        """EVERSTEP_FENCE_COMMAND: JSON list of a program and its arguments that can switch a node off.

        `{node}` and `{address}` in it stand for the node's own; `off` or `status` is added as the last argument. Exit
        code 0 with `off` as the last line of output means that the node is off. Unset: there is no fence provider.
        """
        text = self._variables.get("EVERSTEP_FENCE_COMMAND", "").strip()
        if not text:
            return []
        try:
            argv = json.loads(text)
        except ValueError:
            argv = None
        if not isinstance(argv, list) or not argv or not all(isinstance(part, str) and part for part in argv):
            raise ValueError(
                "EVERSTEP_FENCE_COMMAND must be a JSON list of texts, for example "
                f'["/usr/local/bin/fence", "--host", "{{address}}"], not {text!r:.100}.'
            )
        return argv

    @property
    def fence_timeout_s(self) -> float:
        """EVERSTEP_FENCE_TIMEOUT_S: one run of the fence command is killed after so long; over 0, at most 240."""
        seconds = float(self._variables.get("EVERSTEP_FENCE_TIMEOUT_S", "60"))
        if not 0 < seconds <= 240:
            raise ValueError(f"EVERSTEP_FENCE_TIMEOUT_S must be over 0 and at most 240 s, not {seconds:g}.")
        return seconds

    @property
    def fence_auto(self) -> bool:
        """EVERSTEP_FENCE_AUTO=1: a node that two witnesses miss is switched off without anybody asking."""
        return self._variables.get("EVERSTEP_FENCE_AUTO", "") == "1"

    @property
    def failpoints(self) -> Path | None:
        """EVERSTEP_FAILPOINTS: a folder in which tests arm failpoints; unset in production."""
        folder = self._variables.get("EVERSTEP_FAILPOINTS")
        return Path(folder) if folder else None

    @property
    def instance(self) -> str:
        """Names this process in claims and logs."""
        return f"{socket.gethostname()}:{os.getpid()}"


def _kept_secret(path: Path) -> str:
    import secrets

    try:
        return path.read_text()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = secrets.token_urlsafe(50)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return path.read_text()
        with os.fdopen(descriptor, "w") as file:
            file.write(fresh)
        return fresh


env = Environment()
