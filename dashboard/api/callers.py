"""Who calls: a bearer token, or a browser's session with its CSRF token on everything that changes something."""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpRequest
from ninja.errors import AuthenticationError
from ninja.security import APIKeyCookie, HttpBearer
from ninja.utils import check_csrf

from dashboard.api.problems import Problem
from recovery.access import user_for_api_token


class BearerToken(HttpBearer):
    """`Authorization: Bearer est_api_...`. A wrong token ends the request; the session is not tried then."""

    def authenticate(self, request: HttpRequest, token: str) -> User | None:
        user = user_for_api_token(token)
        if user is None:
            raise AuthenticationError
        return user


class BrowserSession(APIKeyCookie):
    """Django's session cookie. Unlike a bearer token, a browser sends it by itself, hence the CSRF check."""

    param_name = settings.SESSION_COOKIE_NAME

    def __init__(self) -> None:
        super().__init__(csrf=False)

    def authenticate(self, request: HttpRequest, key: str | None) -> User | None:
        user = request.user
        if not isinstance(user, User) or not user.is_active:
            return None
        if check_csrf(request) is not None:
            raise Problem("csrf", "The session's CSRF token is missing or wrong: send it as X-CSRFToken.")
        return user


CALLERS = (BearerToken(), BrowserSession())


def caller(request: HttpRequest) -> User:
    """The user that was authenticated for this operation."""
    user: User = request.auth  # type: ignore[attr-defined]
    return user
