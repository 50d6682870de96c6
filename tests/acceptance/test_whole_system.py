"""One whole system, disturbed in turn: a person's drill in a browser, dying workers, Redis gone, jobs that end.

They share the system because it takes half a minute to start; each test leaves a job that trains, or finds one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos.scenarios import AFTER, ChaosSystem, Scenario, chaos_system, stop_redis
from demo_check.rest import RestError
from demo_check.system import LEISURELY, RunningSystem, order_drill, steady_job, unix_seconds
from playwright.sync_api import expect

from tests.servers.chromium import browser

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_gpt.py"
SHORT_JOB = Path(__file__).with_name("short_job.py")
SCENARIOS = [
    Scenario(name="the worker is killed after every other save", failpoints=AFTER[::2]),
    Scenario(name="Redis is gone for 15 s", disturb=stop_redis(15)),
]


@pytest.fixture(scope="module")
def chaos() -> Iterator[ChaosSystem]:
    with chaos_system(script=LEISURELY) as system:
        yield system


def test_a_person_presses_the_button_and_sees_the_receipt_appear_without_reloading(chaos: ChaosSystem) -> None:
    system = chaos.system
    job = steady_job(system)
    login = json.loads((system.home / "login.json").read_text())
    with browser() as chromium:
        page = chromium.new_page()
        page.set_default_timeout(60_000)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{system.rest.server}/")
        page.get_by_label("User name").fill(login["user"])
        page.get_by_label("Password").fill(login["password"])
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("link", name="Drills").first.click()
        page.get_by_label("Steps after a save").fill("6")
        page.get_by_role("button", name="Trigger drill").click()
        page.get_by_role("button", name="Kill this rank").click()
        page.locator("#drills a[href*='/incidents/']").first.click(timeout=60_000)
        page.evaluate("window.sameDocument = true")
        expect(page.locator("#receipt")).to_contain_text("The receipt comes when")
        expect(page.locator("#receipt")).to_contain_text("Continuity is proven.", timeout=90_000)
        expect(page.locator("#timeline")).to_contain_text("Drill")
        assert page.evaluate("window.sameDocument") is True
    assert problems == []
    assert system.rest.get(f"jobs/{job['id']}")["generation"] == job["generation"] + 1


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "_"))
def test_recovers_by_one_relaunch_when(chaos: ChaosSystem, scenario: Scenario) -> None:
    outcome = chaos.run(scenario)
    assert outcome.wrong == ()
    assert (outcome.state, outcome.relaunches) == ("recovered", 1)
    assert outcome.worker_kills >= (1 if scenario.failpoints else 0)


@pytest.fixture(scope="module")
def idle(chaos: ChaosSystem) -> RunningSystem:
    """The system with its nodes free."""
    stop_all_jobs(chaos.system)
    return chaos.system


@pytest.mark.parametrize("linger_s", [0.0, 4.0], ids=["together", "one_rank_first"])
def test_a_job_that_ends_by_itself_has_succeeded_without_an_incident(idle: RunningSystem, linger_s: float) -> None:
    job = submit_short_job(idle, "--steps", "10", "--linger-s", str(linger_s))
    end = idle.wait_until(lambda: job_if_ended(idle, job["id"]), what="the job to end", limit_s=60)
    assert (end["state"], end["generation"], end["last_step"]) == ("succeeded", 1, 10), end
    assert idle.rest.items(f"incidents?job={job['id']}") == []
    left_at = float((Path(job["checkpoint_directory"]) / "rank-0-left-at").read_text())
    assert unix_seconds(end["ended_at"]) >= left_at


def test_an_exit_with_code_0_before_the_last_step_opens_an_incident(idle: RunningSystem) -> None:
    job = submit_short_job(idle, "--steps", "10", "--leave-at", "5")
    cause = idle.wait_until(lambda: first_cause(idle, job["id"]), what="an incident and its cause", limit_s=60)
    assert cause["kind"] == "early_exit", cause
    stop_all_jobs(idle)
    assert idle.rest.get(f"jobs/{job['id']}")["state"] != "succeeded"


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """Agents of a system that is torn down in the middle of a job can clean no more."""
    shared = Path("/dev/shm")
    before = set(shared.glob("everstep-*/*.job_*"))
    yield shared
    for left in set(shared.glob("everstep-*/*.job_*")) - before:
        shutil.rmtree(left, ignore_errors=True)


def test_a_dead_rank_costs_no_more_than_the_steps_since_the_last_snapshot_in_memory(
    idle: RunningSystem, shared_memory: Path
) -> None:
    """Saved to disk at step 0 alone, kept in memory each 5 steps; nothing stays there once the job has ended."""
    job = submit(
        idle,
        [str(EXAMPLE), "--steps", "100000", "--save-every", "100000", "--device", "cpu", *LEISURELY],
        memory_every=5,
        memory_partner=True,
    )
    idle.wait_until(lambda: (idle.rest.get(f"jobs/{job['id']}")["last_step"] or 0) >= 12, what="12 steps", limit_s=150)
    drill = {"kind": "kill-rank", "job": job["id"], "rank": 1}
    order_drill(idle, drill, key=str(time.time_ns()))
    incident = idle.wait_until(lambda: ended_incident(idle, job["id"]), what="the end of an incident", limit_s=120)
    receipt = incident["receipt"]
    assert incident["state"] == "recovered", incident
    assert receipt["verdict"]["kind"] == "bit-equal", receipt
    assert receipt["parent"]["step"] >= 5 and receipt["parent_in_memory"], receipt
    assert receipt["verdict"]["steps_lost"] <= 10, receipt
    stop_all_jobs(idle)
    idle.wait_until(
        lambda: not list(shared_memory.glob(f"everstep-*/*.{job['id']}")), what="the agents to clean up", limit_s=60
    )


def ended_incident(system: RunningSystem, job: str) -> dict[str, Any] | None:
    for found in system.rest.items(f"incidents?job={job}"):
        incident: dict[str, Any] = system.rest.get(f"incidents/{found['id']}")
        if incident["ended_at"]:
            return incident
    return None


def submit_short_job(system: RunningSystem, *arguments: str) -> dict[str, Any]:
    return submit(system, [str(SHORT_JOB), *arguments])


def submit(system: RunningSystem, script: list[str], **more: Any) -> dict[str, Any]:
    job: dict[str, Any] = system.rest.post(
        "jobs",
        {
            "name": "short",
            "argv": [sys.executable, *script],
            "working_directory": str(SHORT_JOB.parent),
            "checkpoint_directory": str(system.home / "short" / str(time.time_ns())),
            "nodes": 2,
            **more,
        },
    )
    return job


def job_if_ended(system: RunningSystem, job: str) -> dict[str, Any] | None:
    found: dict[str, Any] = system.rest.get(f"jobs/{job}")
    return found if found["ended_at"] else None


def first_cause(system: RunningSystem, job: str) -> dict[str, Any] | None:
    incidents = system.rest.items(f"incidents?job={job}")
    return incidents[0]["cause"] if incidents else None


def stop_all_jobs(system: RunningSystem) -> None:
    for job in system.rest.items("jobs"):
        if job["ended_at"] is None:
            with contextlib.suppress(RestError):  # it may have ended meanwhile
                system.rest.post(f"jobs/{job['id']}/actions", {"kind": "stop"})
    system.wait_until(
        lambda: all(job["ended_at"] for job in system.rest.items("jobs")), what="all jobs to end", limit_s=40
    )
