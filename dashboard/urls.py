"""Addresses of pages and API."""

from __future__ import annotations

from django.urls import URLPattern, URLResolver, include, path

urlpatterns: list[URLPattern | URLResolver] = [
    path("", include("dashboard.api.urls")),
    path("", include("dashboard.views.urls")),
]
