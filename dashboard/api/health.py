"""`/healthz`: this process answers. `/readyz`: it can do its work. Both without credentials and without details."""

from __future__ import annotations

import logging
from collections.abc import Callable

import redis
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_safe

from recovery.wakeup import redis_client

logger = logging.getLogger(__name__)


@require_safe
def healthz(request: HttpRequest) -> JsonResponse:
    """200 as long as the process answers."""
    return JsonResponse({"status": "ok"})


@require_safe
def readyz(request: HttpRequest) -> JsonResponse:
    """200 if the database answers and has every migration, else 503; the broker is reported but not required."""
    checks = {"database": _check(_ask_database, "database"), "migrations": _check(_ask_migrations, "migrations")}
    ready = all(answer == "ok" for answer in checks.values())
    checks["broker"] = _check(_ask_broker, "broker")
    return JsonResponse({"ready": ready, "checks": checks}, status=200 if ready else 503)


def _check(ask: Callable[[], str], what: str) -> str:
    try:
        return ask()
    except (DatabaseError, redis.RedisError, OSError) as err:
        logger.warning("Readiness: the %s does not answer: %s", what, err)
        return "no answer"


def _ask_database() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return "ok"


def _ask_migrations() -> str:
    executor = MigrationExecutor(connection)
    pending = executor.migration_plan(executor.loader.graph.leaf_nodes())
    return f"{len(pending)} not applied" if pending else "ok"


def _ask_broker() -> str:
    redis_client().ping()
    return "ok"
