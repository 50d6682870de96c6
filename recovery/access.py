"""Join tokens, node credentials and API tokens: made, exchanged, checked. Only hashes are stored."""

from __future__ import annotations

import re
import time

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F

from recovery.errors import JoinRefused
from recovery.ids import fresh_secret, hash_secret
from recovery.models import ApiToken, JoinToken, Node

NODE_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")


def create_join_token(*, ttl_s: float = 900.0, uses: int = 1, node_name: str = "") -> str:
    """Return a fresh join token; it is shown once and only its hash is kept."""
    secret = fresh_secret("est_join")
    now = time.time()
    JoinToken.objects.create(
        token_hash=hash_secret(secret),
        prefix=secret[:14],
        created_at=now,
        expires_at=now + ttl_s,
        uses_left=uses,
        node_name=node_name,
    )
    return secret


def join_node(*, token: str, node_name: str) -> str:
    """Exchange a join token for the node's own credential. Raises `JoinRefused`.

    A node that joins again under the same name gets a new credential; the old one stops working.
    """
    if not NODE_NAME.fullmatch(node_name):
        raise JoinRefused(f"{node_name!r} is no node name: use up to 63 letters, digits, dots, dashes and underscores.")
    now = time.time()
    with transaction.atomic():
        used = JoinToken.objects.filter(
            token_hash=hash_secret(token), revoked=False, expires_at__gt=now, uses_left__gt=0
        ).update(uses_left=F("uses_left") - 1)
        if not used:
            raise JoinRefused("This join token is unknown, used up, revoked or expired: create a new one.")
        bound_to = JoinToken.objects.get(token_hash=hash_secret(token)).node_name
        if bound_to and bound_to != node_name:
            raise JoinRefused(f"This join token is for node {bound_to}, not {node_name}.")
        credential = fresh_secret("est_node")
        node, _ = Node.objects.get_or_create(name=node_name, defaults={"joined_at": now})
        node.credential_hash, node.revoked = hash_secret(credential), False
        node.save(update_fields=["credential_hash", "revoked"])
    return credential


def node_for_credential(credential: str) -> Node | None:
    """The node that owns a credential, or None."""
    if not credential:
        return None
    return Node.objects.filter(credential_hash=hash_secret(credential), revoked=False).first()


def create_api_token(*, user: User, name: str, ttl_s: float | None = None) -> str:
    """Return a fresh bearer token for the REST API; shown once."""
    secret = fresh_secret("est_api")
    now = time.time()
    ApiToken.objects.create(
        user=user,
        name=name,
        token_hash=hash_secret(secret),
        prefix=secret[:13],
        created_at=now,
        expires_at=None if ttl_s is None else now + ttl_s,
    )
    return secret


def user_for_api_token(secret: str) -> User | None:
    """The active user behind a bearer token, or None."""
    token = ApiToken.objects.select_related("user").filter(token_hash=hash_secret(secret), revoked=False).first()
    now = time.time()
    if token is None or (token.expires_at is not None and token.expires_at < now) or not token.user.is_active:
        return None
    if token.last_used_at is None or now - token.last_used_at > 60:
        ApiToken.objects.filter(pk=token.pk).update(last_used_at=now)
    return token.user
