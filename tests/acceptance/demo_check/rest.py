"""The REST API as any client sees it; address and token come from the file that `manage.py bootstrap` keeps."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


class RestError(Exception):
    """The server answered with an error; `status` is its code, the text its own words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{status}: {words}")
        self.status = status


class Rest:
    """GET and POST below /api/v1, decoded."""

    def __init__(self, client_file: Path) -> None:
        client = json.loads(client_file.read_text())
        self.server: str = client["server"]
        self._token: str = client["token"]

    def get(self, path: str) -> Any:
        return self._call("GET", path, None, {})

    def post(self, path: str, body: dict[str, Any], *, key: str = "") -> Any:
        return self._call("POST", path, body, {"Idempotency-Key": key} if key else {})

    def items(self, path: str) -> list[dict[str, Any]]:
        """A list resource, whether or not it comes in an envelope."""
        answer = self.get(path)
        return list(answer["items"]) if isinstance(answer, dict) else list(answer)

    def _call(self, method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
        request = urllib.request.Request(
            f"{self.server}/api/v1/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json", **headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise RestError(error.code, error.read().decode(errors="replace")[:600]) from error
