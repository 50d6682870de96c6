"""`make axe SEED=1`: every page in both colours and both widths, with the breaker shut and open. The last line is JSON.

The seed decides on the order.
"""

from __future__ import annotations

import json
import os
import random
import sys

from live_site import opened, serving
from looks import Look, all_pages, every_look, pages_with_breaker, wrong_with
from playwright.sync_api import Page

from tests.servers.chromium import browser


def main() -> int:
    seed = int(os.environ.get("SEED") or 1)
    with serving(broker=True) as site, browser() as chromium:
        shut = every_look(all_pages(site))
        with opened(chromium, site) as page:
            found = look_at(page, shut, seed=seed)
        with opened(chromium, site, signed_in=False) as page:
            login = every_look({"login": "/login"})
            found |= look_at(page, login, seed=seed)
        site.fleet("breaker")
        open_ = every_look(pages_with_breaker(site))
        with opened(chromium, site) as page:
            found |= {f"{name}, breaker open": wrong for name, wrong in look_at(page, open_, seed=seed).items()}
    looks = len(shut) + len(login) + len(open_)
    print(json.dumps({"looks": looks, "complaints": sum(map(len, found.values())), "seed": seed}))
    return 1 if found else 0


def look_at(page: Page, looks: list[Look], *, seed: int) -> dict[str, list[str]]:
    shuffled = random.Random(seed).sample(looks, len(looks))
    found = wrong_with(page, shuffled)
    print(f"{len(looks)} looks", *(f"{name}: {wrong}" for name, wrong in found.items()), sep="\n  ", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
