"""`Idempotency-Key`: a repeated POST gets the stored answer and has no second effect.

The record is written in the same transaction as the effect, before it: a duplicate that comes while the first still
runs waits on the unique constraint (PostgreSQL) or on the database's write lock (SQLite) and then finds the answer.
Refused requests have no effect and leave no record.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable

from django.db import IntegrityError, OperationalError, transaction
from django.http import HttpRequest, JsonResponse
from pydantic import BaseModel

from dashboard.api.callers import caller
from dashboard.api.problems import Problem
from recovery.models import IdempotencyRecord

KEPT_S = 24 * 3600.0
KEY = re.compile(r"[\x21-\x7e]{1,200}")
RETRY_AFTER_S = 1


def once(
    request: HttpRequest, effect: Callable[[], BaseModel], *, status: int, key_required: bool = False
) -> JsonResponse:
    """Run `effect` and answer with what it returns, or repeat the answer that this caller's key got before.

    Without a key the effect simply runs, unless `key_required`. Raises `Problem`, and whatever `effect` raises.
    """
    key = _key(request, required=key_required)
    if key is None:
        return _answer(effect().model_dump(mode="json"), status=status)
    caller_id, body_hash = f"user:{caller(request).pk}", _body_hash(request)
    now = time.time()
    try:
        with transaction.atomic():
            if (record := _kept(caller_id, request.path, key, now=now)) is not None:
                return _repeat(record, body_hash)
            record = _begin(caller_id, request.path, key, body_hash=body_hash, status=status, now=now)
            answer = effect().model_dump(mode="json")
            record.answer = answer
            record.save(update_fields=["answer"])
    except _CameSecond:
        # What the first request with this key stored is committed by now.
        first = _kept(caller_id, request.path, key, now=now)
        if first is None:
            raise _in_progress("Another request with this Idempotency-Key was under way.") from None
        return _repeat(first, body_hash)
    except OperationalError as err:
        if "locked" not in str(err):
            raise
        raise _in_progress("The database was busy with another request for too long; nothing was done.") from err
    return _answer(answer, status=status)


class _CameSecond(Exception):
    """The unique constraint says that another request with the same key has begun."""


def _begin(caller_id: str, path: str, key: str, *, body_hash: str, status: int, now: float) -> IdempotencyRecord:
    try:
        return IdempotencyRecord.objects.create(
            caller=caller_id, path=path, key=key, body_hash=body_hash, status=status, answer={}, created_at=now
        )
    except IntegrityError as err:
        raise _CameSecond from err


def _in_progress(why: str) -> Problem:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return Problem("in_progress", f"{why} Send the same request again.", headers=headers)


def _key(request: HttpRequest, *, required: bool) -> str | None:
    key = request.headers.get("Idempotency-Key")
    if key is None:
        if required:
            raise Problem(
                "key_required",
                "This request needs an Idempotency-Key header: any fresh string, the same again when you repeat it.",
            )
        return None
    if not KEY.fullmatch(key):
        raise Problem("bad_request", "Idempotency-Key must be 1 to 200 printable ASCII characters without spaces.")
    return key


def _body_hash(request: HttpRequest) -> str:
    """SHA-256 of the JSON value, so that member order and white space make no difference."""
    canonical = json.dumps(json.loads(request.body or b"null"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _kept(caller_id: str, path: str, key: str, *, now: float) -> IdempotencyRecord | None:
    """The record of this key; records past their time are removed on the way."""
    IdempotencyRecord.objects.filter(created_at__lt=now - KEPT_S).delete()
    return IdempotencyRecord.objects.filter(caller=caller_id, path=path, key=key).first()


def _repeat(record: IdempotencyRecord, body_hash: str) -> JsonResponse:
    if record.body_hash != body_hash:
        raise Problem("key_reused", "This Idempotency-Key was used with another body before: use a fresh key.")
    response = _answer(record.answer, status=record.status)
    response["Idempotent-Replayed"] = "true"
    return response


def _answer(answer: object, *, status: int) -> JsonResponse:
    return JsonResponse(answer, status=status, safe=False)
