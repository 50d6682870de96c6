"""What is asked of every page, however it is shown: no complaint of the browser, nothing serious of axe's, no sideways
scrolling. `make axe` looks at each in both colours and both widths, the tests at a part of them by the seed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live_site import Site
from playwright.sync_api import Page, expect

AXE = Path(__file__).resolve().parents[2] / "node_modules" / "axe-core" / "axe.min.js"
WIDTHS = (1280, 390)
NO_PAGE = "no page"
WITH_BREAKER = ("overview", "nodes", "node", "job", "incidents", "incident that waits for a fence", "drills")
"""Pages that say that the breaker is open, once it is."""


@dataclass(frozen=True)
class Look:
    name: str
    path: str
    dark: bool = False
    width: int = WIDTHS[0]

    def __str__(self) -> str:
        return f"{self.name} ({'dark' if self.dark else 'light'}, {self.width} px)"


def every_look(paths: Mapping[str, str]) -> list[Look]:
    return [Look(name, path, dark, width) for dark in (False, True) for width in WIDTHS for name, path in paths.items()]


def drawn_looks(paths: Mapping[str, str], *, seed: int) -> list[Look]:
    """One of every other page; each colour with each width gets as many of them, one more or less."""
    shown = [(dark, width) for dark in (False, True) for width in WIDTHS]
    names = sorted(paths)
    random.Random(seed).shuffle(names)
    names = names[: (len(names) + 1) // 2]
    return [Look(name, paths[name], *shown[number % len(shown)]) for number, name in enumerate(names)]


def all_pages(site: Site) -> dict[str, str]:
    return site.pages | {"list of the API's errors": "/docs/errors", NO_PAGE: "/no-such-page"}


def pages_with_breaker(site: Site) -> dict[str, str]:
    return {name: site.pages[name] for name in WITH_BREAKER} | {"breaker": breaker_page(site)}


def breaker_page(site: Site) -> str:
    return f"/incidents/{site.ids['opened_breaker']}"


def wrong_with(page: Page, looks: Iterable[Look]) -> dict[str, list[str]]:
    """Look -> what is wrong; only those with which something is."""
    complaints = complaints_of(page)
    found: dict[str, list[str]] = {}
    for look in looks:
        page.emulate_media(color_scheme="dark" if look.dark else "light")
        page.set_viewport_size({"width": look.width, "height": 900})
        complaints.clear()
        page.goto(look.path)
        if page.locator(".live-bar").count():
            wait_until_live(page)
        wrong = axe_complaints(page)
        if not page.evaluate("document.documentElement.scrollWidth <= innerWidth"):
            wrong.append("scrolls sideways")
        if (headings := page.locator("h1").count()) != 1:
            wrong.append(f"has {headings} headings of the first rank")
        page.wait_for_timeout(100)  # A complaint of a late script or of the first live fetch.
        wrong += [words for words in complaints if look.name != NO_PAGE or "404" not in words]
        if wrong:
            found[str(look)] = wrong
    return found


def visit(page: Page, path: str) -> None:
    page.goto(path)
    wait_until_live(page)


def wait_until_live(page: Page, *states: str) -> None:
    wanted = re.compile("|".join(states or ("live", "polling")))
    expect(page.locator(".live-bar")).to_have_attribute("data-live", wanted)


def complaints_of(page: Page) -> list[str]:
    """A list that the browser's complaints go into: errors and warnings, refused or failed fetches."""
    complaints: list[str] = []

    def on_console(message: Any) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def on_failed_request(request: Any) -> None:
        # A fetch that ends because the page is left is no failure.
        if "ERR_ABORTED" not in str(request.failure):
            complaints.append(f"{request.url}: {request.failure}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", on_failed_request)
    return complaints


def restyle(page: Page, rules: str) -> None:
    """Put rules behind the page's own, by a sheet that the content policy allows and no live fetch carries away."""
    page.evaluate(
        """rules => {
            const sheet = new CSSStyleSheet();
            sheet.replaceSync(rules);
            document.adoptedStyleSheets = [sheet];
        }""",
        rules,
    )


def axe_complaints(page: Page) -> list[str]:
    assert AXE.exists(), "axe-core is missing: run `python manage.py vendor_static`, which installs it with npm."
    # Evaluated through the debugger: a script tag would be stopped by the content policy.
    page.evaluate(AXE.read_text() + "; undefined")
    # Axe judges no contrast over gradients, which here are but the shadows at the sides of a table that scrolls.
    restyle(page, ".table-scroll { background: none !important; }")
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{violation['id']}: {[node['html'][:160] for node in violation['nodes'][:3]]}"
        for violation in result["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
