"""Log lines of the agent: `time level what key=value ...` on stderr. Every module of the agent logs through here."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class KeyValueFormatter(logging.Formatter):
    """Formats a record and its fields as one line; values with spaces are quoted, newlines never get through."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds")
        parts = [when, record.levelname.lower(), _value(record.getMessage())]
        fields: dict[str, object] = getattr(record, "fields", {})
        parts.extend(f"{key}={_value(value)}" for key, value in fields.items())
        if record.exc_info:
            parts.append(f"trace={json.dumps(self.formatException(record.exc_info))}")
        return " ".join(parts)


def _value(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


def configure_logging(*, verbose: bool) -> None:
    """Send the agent's lines to stderr, its own from INFO (DEBUG if verbose), those of libraries from WARNING."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("agents").setLevel(logging.DEBUG if verbose else logging.INFO)


class NodeLog:
    """One module's logger; fields are keyword arguments: `log.info("connected", server=url)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, what: str, **fields: object) -> None:
        self._logger.debug(what, extra={"fields": fields})

    def info(self, what: str, **fields: object) -> None:
        self._logger.info(what, extra={"fields": fields})

    def warning(self, what: str, **fields: object) -> None:
        self._logger.warning(what, extra={"fields": fields})

    def error(self, what: str, **fields: object) -> None:
        self._logger.error(what, extra={"fields": fields})

    def exception(self, what: str, **fields: object) -> None:
        self._logger.exception(what, extra={"fields": fields})
