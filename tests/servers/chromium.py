"""The browser of the tests: the headless shell where there is one, which costs a third of a whole Chromium."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """The system's, else the one that Playwright may have installed."""
    program = next((found for name in _PROGRAMS if (found := shutil.which(name))), None)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=list(_OPTIONS))
        yield launched
        launched.close()
