"""A browser's socket against real rows: who may listen to what, and for how long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.sessions.backends.db import SessionStore
from django.test import Client

from dashboard.consumers import browsers
from recovery.models import Job

pytestmark = pytest.mark.django_db(transaction=True)


class Socket:
    """The two ends of an ASGI websocket."""

    def __init__(self) -> None:
        self.to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.from_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(15):
            return await self.from_server.get()

    async def next_frame(self) -> dict[str, Any]:
        message = await self.next()
        assert message["type"] == "websocket.send", message
        frame: dict[str, Any] = json.loads(message["text"])
        return frame


@asynccontextmanager
async def connected(topics: str, *, user: Any, session_key: str = "") -> AsyncIterator[Socket]:
    socket = Socket()
    scope = {
        "type": "websocket",
        "query_string": f"topics={topics}".encode(),
        "user": user,
        "session": SessionStore(session_key),
    }
    await socket.to_server.put({"type": "websocket.connect"})
    consumer = asyncio.create_task(
        browsers.BrowserConsumer()(scope, socket.to_server.get, socket.from_server.put)  # type: ignore[arg-type]
    )
    try:
        assert (await socket.next())["type"] == "websocket.accept"
        yield socket
    finally:
        await socket.to_server.put({"type": "websocket.disconnect"})
        async with asyncio.timeout(15):
            await consumer


def signed_in_user() -> tuple[User, str]:
    user = User.objects.create_user("operator", password="watch-the-curve")
    client = Client()
    client.force_login(user)
    return user, client.session.session_key or ""


async def test_closes_a_socket_without_a_user_with_4401() -> None:
    async with connected("fleet", user=AnonymousUser()) as socket:
        assert (await socket.next())["code"] == browsers.CLOSE_SIGNED_OUT


@pytest.mark.parametrize("topics", ["users", "job:../etc", ",".join(f"job:j{n}" for n in range(51))])
async def test_closes_a_socket_that_asks_for_unknown_or_too_many_topics(topics: str) -> None:
    user, key = await sync_to_async(signed_in_user)()
    async with connected(topics, user=user, session_key=key) as socket:
        assert (await socket.next())["code"] == browsers.CLOSE_BAD_TOPICS


async def test_first_frame_says_where_the_topics_stand() -> None:
    user, key = await sync_to_async(signed_in_user)()
    await Job.objects.acreate(
        id="job_a", name="tiny", spec={}, state="running", last_step=41, submitted_at=1.0, state_since=1.0
    )
    async with connected("job:job_a", user=user, session_key=key) as socket:
        frame = await socket.next_frame()
    assert {"topic": "job:job_a", "seq": 41} in frame["notices"]
    assert frame["mode"] in ("live", "polling")


async def test_log_out_closes_the_open_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browsers, "SESSION_CHECK_S", 0.05)
    user, key = await sync_to_async(signed_in_user)()
    async with connected("fleet", user=user, session_key=key) as socket:
        assert (await socket.next())["type"] == "websocket.send"
        await sync_to_async(SessionStore(key).flush)()
        while (message := await socket.next())["type"] == "websocket.send":
            pass
        assert message["code"] == browsers.CLOSE_SIGNED_OUT
