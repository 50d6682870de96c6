"""The domain decides by its arguments alone: no framework, no clock, no ids or chance of its own."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import recovery.domain

FOLDER = Path(recovery.domain.__file__).parent
MODULES = sorted(module.name for module in pkgutil.iter_modules([str(FOLDER)]))
FORBIDDEN = {
    "time",
    "datetime",
    "uuid",
    "random",
    "secrets",
    "os",
    "socket",
    "subprocess",
    "asyncio",
    "threading",
    "pathlib",
}


def test_imports_without_django() -> None:
    program = "import sys\n" + "".join(f"import recovery.domain.{name}\n" for name in MODULES)
    program += "print(sorted(m for m in ('django', 'celery', 'channels', 'redis', 'torch') if m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_every_module_is_found() -> None:
    assert {"machine", "lifecycle", "placement", "lineage", "continuity", "diagnosis", "invariants"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_reads_no_clock_and_draws_no_ids_or_chance(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    imported = set()
    for found in ast.walk(tree):
        if isinstance(found, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in found.names}
        elif isinstance(found, ast.ImportFrom) and found.module:
            imported.add(found.module.split(".")[0])
    assert imported & FORBIDDEN == set()
    assert {item for item in imported if item not in sys.stdlib_module_names} <= {"recovery", "agents"}


@pytest.mark.parametrize("name", MODULES)
def test_imports_nothing_of_recovery_outside_the_domain(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    inner = {found.module for found in ast.walk(tree) if isinstance(found, ast.ImportFrom) and found.module}
    strays = {m for m in inner if m.startswith(("recovery", "agents"))}
    assert all(m.startswith(("recovery.domain", "agents.protocol")) for m in strays)
