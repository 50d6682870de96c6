"""Every environment variable that the server reads, in one place, with its default and meaning."""

from __future__ import annotations

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
        """EVERSTEP_ALLOWED_HOSTS: comma-separated; loopback by default."""
        hosts = self._variables.get("EVERSTEP_ALLOWED_HOSTS", "127.0.0.1,localhost,[::1]")
        return [host.strip() for host in hosts.split(",") if host.strip()]

    @property
    def database_url(self) -> str:
        """EVERSTEP_DATABASE_URL: postgresql://user:password@host:port/name; empty means SQLite in the home folder."""
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
