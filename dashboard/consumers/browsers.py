"""A browser's socket: says which topics have news. What the news are, the page fetches over HTTP.

Serves `/ws/live?topics=incident:<id>,job:<id>,fleet`. It has its own receive loop: the stock consumer hops through one
shared thread per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs

from channels.consumer import AsyncConsumer
from django.conf import settings
from django.contrib.auth import get_user
from django.http import HttpRequest

from dashboard.database_threads import in_database_thread
from dashboard.live import LiveFeed, Subscription, live_feed

TOPIC = re.compile(r"fleet|(?:job|incident|drill):(?:\*|[a-z0-9_-]{1,40})")
MAX_TOPICS = 50
ALIVE_S = 5.0
"""A frame at least this often, so that the page knows that silence means loss."""
GAP_S = 0.1
"""Between two frames: bursts are told as one."""
SESSION_CHECK_S = 15.0
CLOSE_SIGNED_OUT = 4401
CLOSE_BAD_TOPICS = 4400


class BrowserConsumer(AsyncConsumer):
    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:  # type: ignore[override]
        if (await receive())["type"] != "websocket.connect":
            return
        # Accepted first: a close before that reaches the page as "failed" without its code.
        await send({"type": "websocket.accept"})
        if not scope["user"].is_authenticated:
            await send({"type": "websocket.close", "code": CLOSE_SIGNED_OUT, "reason": "Log in first."})
            return
        topics = _topics(scope["query_string"])
        if topics is None:
            await send({"type": "websocket.close", "code": CLOSE_BAD_TOPICS, "reason": "Unknown or too many topics."})
            return
        feed = live_feed()
        async with feed.subscribe(topics) as subscription:
            signed_out = asyncio.create_task(_until_signed_out(scope["session"].session_key))
            tasks = [
                asyncio.create_task(_until_gone(receive)),
                asyncio.create_task(_tell(send, feed, subscription)),
                signed_out,
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                if not isinstance(task.exception(), (OSError, type(None))):
                    task.result()
            # Closed only once nothing tells any more: a frame behind the close is an error of the server.
            if done == {signed_out} and signed_out.exception() is None:
                with contextlib.suppress(OSError):  # the browser may have gone meanwhile
                    await send(
                        {"type": "websocket.close", "code": CLOSE_SIGNED_OUT, "reason": "The session has ended."}
                    )


async def _until_gone(receive: Any) -> None:
    """What a page sends is of no interest; its going is."""
    while (await receive())["type"] != "websocket.disconnect":
        pass


async def _tell(send: Any, feed: LiveFeed, subscription: Subscription) -> None:
    while True:
        try:
            changed = await asyncio.wait_for(subscription.take(), ALIVE_S)
        except TimeoutError:
            changed = {}
        frame = {
            "mode": feed.mode,
            "now": time.time(),
            "as_of": feed.as_of,
            "notices": [{"topic": topic, "seq": seq} for topic, seq in changed.items()],
        }
        await send({"type": "websocket.send", "text": json.dumps(frame)})
        await asyncio.sleep(GAP_S)


async def _until_signed_out(session_key: str) -> None:
    while await in_database_thread(_signed_in, session_key):  # noqa: ASYNC110 (only the database knows of a log-out)
        await asyncio.sleep(SESSION_CHECK_S)


def _signed_in(session_key: str) -> bool:
    """Whether the session still exists and is its user's: ended by log-out, expiry, or a changed password."""
    request = HttpRequest()
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
    return get_user(request).is_authenticated


def _topics(query: bytes) -> frozenset[str] | None:
    """The topics of a query string; None if one is malformed or there are too many."""
    named = ",".join(parse_qs(query.decode("latin-1")).get("topics", [])).split(",")
    topics = frozenset(topic for topic in named if topic)
    if len(topics) > MAX_TOPICS or not all(TOPIC.fullmatch(topic) for topic in topics):
        return None
    return topics
