"""Addresses of the REST API, of the health checks, and of the page that `type` of a problem document names."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import URLPattern, URLResolver, path

from dashboard.api.app import api
from dashboard.api.health import healthz, readyz
from dashboard.api.problems import KINDS


def error_kinds(request: HttpRequest) -> HttpResponse:
    """Every kind of error with what to do about it."""
    return render(request, "error_kinds.html", {"kinds": KINDS.values()})


urlpatterns: list[URLPattern | URLResolver] = [
    path("api/v1/", api.urls),
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
    path("docs/errors", error_kinds, name="error_kinds"),
]
