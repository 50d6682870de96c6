"""Secrets (as hashes) and the record of idempotent requests."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class JoinToken(models.Model):
    """Lets agents join: short-lived, counted, revocable; exchanged once for a credential of the node's own."""

    token_hash = models.CharField(max_length=64, unique=True)
    prefix = models.CharField(max_length=20)
    created_at = models.FloatField()
    expires_at = models.FloatField()
    uses_left = models.IntegerField(default=1)
    node_name = models.CharField(max_length=200, blank=True)
    """If set, only a node of this name may use it."""
    revoked = models.BooleanField(default=False)


class ApiToken(models.Model):
    """A bearer token of the REST API."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="api_tokens")
    name = models.CharField(max_length=100)
    token_hash = models.CharField(max_length=64, unique=True)
    prefix = models.CharField(max_length=20)
    created_at = models.FloatField()
    expires_at = models.FloatField(null=True)
    last_used_at = models.FloatField(null=True)
    revoked = models.BooleanField(default=False)


class IdempotencyRecord(models.Model):
    """The answer to a POST with an `Idempotency-Key`: a repeat gets the same answer and has no second effect."""

    caller = models.CharField(max_length=200)
    path = models.CharField(max_length=400)
    key = models.CharField(max_length=200)
    body_hash = models.CharField(max_length=64)
    status = models.IntegerField()
    answer = models.JSONField()
    created_at = models.FloatField()

    class Meta:
        constraints = (models.UniqueConstraint(fields=("caller", "path", "key"), name="one_answer_per_key"),)
