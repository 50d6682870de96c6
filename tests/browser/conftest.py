"""Fixtures of the browser tests; they live in `live_site.py`, which the tests also import."""

from live_site import chromium, site, site_without_redis

__all__ = ["chromium", "site", "site_without_redis"]
