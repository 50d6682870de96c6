"""The web edge: HTTP to Django, sockets to two consumers that share nothing.

Agents come without Origin and without cookies, so that their route stands outside the origin validator and the session
middleware; browsers' route stands inside both.
"""

from __future__ import annotations

import os
from typing import Any, cast

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.core.asgi import get_asgi_application
from django.urls import path

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")
django_application = get_asgi_application()

from dashboard.consumers.agents import agent_socket, lifespan  # noqa: E402  (needs Django's app registry)
from dashboard.consumers.browsers import BrowserConsumer  # noqa: E402

socket_routes: list[Any] = [  # plain ASGI applications are welcome here, though the stubs know views only
    path("ws/agent", cast(Any, agent_socket)),
    path("ws/live", cast(Any, AllowedHostsOriginValidator(AuthMiddlewareStack(BrowserConsumer.as_asgi())))),
]
application = ProtocolTypeRouter(
    {"http": django_application, "websocket": URLRouter(socket_routes), "lifespan": cast(Any, lifespan)}
)
