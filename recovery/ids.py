"""Fresh identifiers with a kind prefix, and fingerprints of secrets. Called by the shells, never by the domain."""

from __future__ import annotations

import hashlib
import secrets

_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"


def fresh_id(prefix: str) -> str:
    """Return for example `inc_7k2m9x4tq8wd`: 12 characters of 31, about 59 bits."""
    return f"{prefix}_" + "".join(secrets.choice(_ALPHABET) for _ in range(12))


def fresh_secret(prefix: str) -> str:
    """Return a secret with a prefix that scanners can find, for example `est_join_...`."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def hash_secret(secret: str) -> str:
    """SHA-256 of a secret of high entropy; only this is stored."""
    return hashlib.sha256(secret.encode()).hexdigest()
