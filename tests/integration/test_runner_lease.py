"""Leases kept by real runners and ranks: frozen nodes, silent servers, and who ends whom."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launches import Generation, has_ended, wait_until

from everstep.checkpoint.manifest import complete_checkpoints
from tests.integration.forked_generation import ForkedGeneration, warm_up

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_gpt.py"
LIMIT_S = 2.0
TERMS = {"setup_s": 90.0, "compile_s": 90.0, "step_s": LIMIT_S, "save_s": LIMIT_S, "evaluation_s": LIMIT_S}


def training(*, step_time_s: float, save_every: int = 1000) -> list[str]:
    options = ["--steps", "1000", "--save-every", str(save_every), "--step-time", str(step_time_s)]
    return [sys.executable, str(EXAMPLE), "--device", "cpu", "--batch", "4", *options]


def steps(generation: Generation, rank: int) -> list[int]:
    return [line["step"] for line in generation.log(rank) if line["kind"] == "step"]


def pid_of(generation: Generation, rank: int) -> int:
    pid: int = generation.wait_event(rank, "rank_started")["pid"]
    return pid


def test_ranks_that_step_need_no_contact_and_are_killed_when_one_of_them_stops(tmp_path: Path) -> None:
    warm_up()
    with ForkedGeneration(tmp_path, training(step_time_s=0.02), terms=TERMS) as generation:
        wait_until(lambda: len(steps(generation, 0)) >= 5 and len(steps(generation, 1)) >= 5)
        time.sleep(3.2 * LIMIT_S)
        assert [runner.poll() for runner in generation.runners] == [None, None], "contact was never renewed"
        pids = [pid_of(generation, rank) for rank in range(2)]
        stepped = len(steps(generation, 0))
        os.kill(pids[1], signal.SIGSTOP)
        stopped_at = time.monotonic()
        assert all(has_ended(pid, limit_s=LIMIT_S + 1.0 - (time.monotonic() - stopped_at)) for pid in pids)
        assert time.monotonic() - stopped_at > LIMIT_S - 0.5
        assert stepped > 20
        codes = [runner.wait(timeout=10) for runner in generation.runners]
        # A rank that waits for a stopped one may die of its end a moment before its own lease has run out.
        assert codes in ([76, 76], [1, 76])
        if codes[0] == 1:
            assert generation.events(0, "runner_ended")[0]["reason"] == "rank_failed"
        for node in (node for node, code in enumerate(codes) if code == 76):
            kinds = [event["kind"] for event in generation.every_event(node)]
            assert kinds == ["runner_started", "rank_started", "lease_expired", "rank_exited", "runner_ended"]
            expired, exited, ended = generation.every_event(node)[2:]
            assert expired["limit_s"] == LIMIT_S and LIMIT_S < expired["silent_s"] < LIMIT_S + 1.0
            # Only a kill ends the stopped rank; the one that waits for it may see that before it is killed itself.
            assert exited["signal"] == signal.SIGKILL or (node == 0 and exited["exit_code"] in (1, 76))
            assert ended["reason"] == "lease" and "no contact with the server and no progress" in ended["detail"]


@pytest.mark.parametrize(
    ("leased", "thawed"),
    [(True, "rank alone"), (True, "runner and rank"), (False, "rank alone")],
    ids=["rank-first", "runner-first", "control-without-lease"],
)
def test_thawed_rank_neither_reports_the_step_in_hand_nor_saves(tmp_path: Path, leased: bool, thawed: str) -> None:
    """Without a lease it does, though its peer is gone: so the fault that the lease prevents is real."""
    warm_up()
    kind = ForkedGeneration if thawed == "rank alone" else Generation
    with kind(tmp_path, training(step_time_s=0.5), terms=TERMS if leased else None) as generation:
        wait_until(lambda: len(steps(generation, 1)) >= 4)
        rank_0, rank_1 = pid_of(generation, 0), pid_of(generation, 1)
        runner = generation.runners[1].pid
        time.sleep(0.2)  # into the half second in which the step in hand needs nobody else
        os.kill(rank_1, signal.SIGSTOP)
        os.kill(runner, signal.SIGSTOP)
        os.kill(rank_0, signal.SIGKILL)
        before = steps(generation, 1)
        checkpoints = complete_checkpoints(tmp_path / "checkpoints")
        time.sleep(LIMIT_S + 1.0)
        assert not has_ended(rank_1, limit_s=0)
        if leased:
            generation.renew(1)  # the agent was thawed a moment earlier, and has already heard from the server
        if thawed == "runner and rank":
            os.kill(runner, signal.SIGCONT)
        os.kill(rank_1, signal.SIGCONT)
        assert has_ended(rank_1, limit_s=20.0)
        os.kill(runner, signal.SIGCONT)
        assert generation.runners[1].wait(timeout=20) != 0
        after = steps(generation, 1)
        if not leased:
            assert after[:-1] == before, "the step in hand was finished and reported"
            return
        assert after == before
        assert complete_checkpoints(tmp_path / "checkpoints") == checkpoints
        exited = generation.wait_event(1, "rank_exited", limit_s=5)
        if exited["signal"] == signal.SIGKILL:
            assert thawed == "runner and rank"
            assert generation.wait_event(1, "runner_ended")["reason"] == "lease"
        else:
            assert exited["exit_code"] == 76 and "lease has run out" in exited["detail"]


# --- Ranks that need no torch and do not look at the lease themselves -------------------------------------------------

SLOT_WRITER = """
import os, struct, sys, time
path, log, pace_s = os.environ["EVERSTEP_PROGRESS"], sys.argv[1], float(sys.argv[2])
fd = os.open(path, os.O_RDWR)
for step in range(1, 10**6):
    os.pwrite(fd, struct.pack("<QII", time.clock_gettime_ns(time.CLOCK_BOOTTIME), 2, step), 0)
    open(log, "a").write(f"{step}\\n")
    time.sleep(0.05 if step < 4 else pace_s)
"""
SHORT = {"setup_s": 30.0, "compile_s": 30.0, "step_s": 1.0, "save_s": 1.0, "evaluation_s": 1.0}


def writer(tmp_path: Path, *, pace_s: float) -> list[str]:
    (tmp_path / "writer.py").write_text(SLOT_WRITER)
    return [sys.executable, "-S", str(tmp_path / "writer.py"), str(tmp_path / "steps"), str(pace_s)]


def test_runner_judges_by_the_gap_before_a_thawed_rank_or_agent_can_renew(tmp_path: Path) -> None:
    with Generation(tmp_path, writer(tmp_path, pace_s=0.1), nodes=1, terms=SHORT) as generation:
        rank = pid_of(generation, 0)
        wait_until(lambda: generation.slot(0)[2] >= 6)
        for pid in (rank, generation.runners[0].pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.6)
        os.kill(rank, signal.SIGCONT)
        reached = generation.slot(0)[2]
        wait_until(lambda: generation.slot(0)[2] > reached, limit_s=5)
        generation.renew(0)
        os.kill(generation.runners[0].pid, signal.SIGCONT)
        assert has_ended(rank, limit_s=0.7)
        assert generation.runners[0].wait(timeout=10) == 76
        expired = generation.events(0, "lease_expired")[0]
        assert expired["limit_s"] == 1.0 and 1.4 < expired["silent_s"] < 5.0
        assert generation.events(0, "runner_ended")[0]["reason"] == "lease"


def test_contact_keeps_ranks_that_make_no_progress_and_raised_terms_are_taken_over(tmp_path: Path) -> None:
    with Generation(tmp_path, writer(tmp_path, pace_s=600), nodes=1, terms=SHORT) as generation:
        rank = pid_of(generation, 0)
        wait_until(lambda: generation.slot(0)[2] >= 4)
        for _ in range(16):
            generation.renew(0)
            time.sleep(0.2)
        assert not has_ended(rank, limit_s=0), "three limits without a step, in contact"
        generation.change_terms(0, {**SHORT, "step_s": 3.0})
        time.sleep(1.8)
        assert not has_ended(rank, limit_s=0), "no contact, within the raised limit"
        generation.change_terms(0, {**SHORT, "step_s": 1.0})
        assert not has_ended(rank, limit_s=0.6), "terms never fall"
        assert has_ended(rank, limit_s=2.0)
        assert generation.wait_event(0, "lease_expired")["limit_s"] == 3.0


def test_launch_of_the_protocol_before_runs_without_a_lease(tmp_path: Path) -> None:
    code = "import os\nprint(sorted(name for name in os.environ if name.startswith('EVERSTEP_') and 'LEASE' in name))"
    (tmp_path / "script.py").write_text(code)
    with Generation(tmp_path, [sys.executable, str(tmp_path / "script.py")], nodes=1, protocol=1) as generation:
        path = generation.directories[0] / "launch.json"
        launch = json.loads(path.read_text())
        assert generation.runners[0].wait(timeout=60) == 0
        assert launch["protocol"] == 1 and generation.output(0) == "[]\n"
        assert generation.events(0, "runner_started")[0]["protocol"] == 1


def test_runner_whose_lease_cannot_be_kept_starts_nothing(tmp_path: Path) -> None:
    with Generation(tmp_path, ["true"], nodes=1, terms=SHORT, lease=str(tmp_path / "no-such-file")) as generation:
        assert generation.runners[0].wait(timeout=30) == 2
        assert generation.every_event(0) == []


SLOW_SAVES = """
import time
import torch
import everstep

class Slow(torch.nn.Linear):
    pause_s = 0.0

    def state_dict(self, *arguments, **options):
        pause_s, Slow.pause_s = Slow.pause_s, 0.0
        time.sleep(pause_s)
        return super().state_dict(*arguments, **options)

model = Slow(1, 1)
run = everstep.Run(total_steps=20, save_every=8)
run.track(model=model, optimizer=None, scheduler=None, sampler=None)
run.resume()
for step in run.steps():
    time.sleep(0.1)
    Slow.pause_s = {8: 4 * STEP_LIMIT_S, 16: 600.0}.get(step, 0.0)
"""


def test_case_R43_save_of_four_times_the_limit_of_a_step_has_its_own_limit_and_the_record_names_it(
    tmp_path: Path,
) -> None:
    step_limit_s, save_limit_s = 1.0, 8.0
    script = tmp_path / "slow.py"
    script.write_text(SLOW_SAVES.replace("STEP_LIMIT_S", str(step_limit_s)))
    terms = {**TERMS, "step_s": step_limit_s, "save_s": save_limit_s, "evaluation_s": 2.0}
    with Generation(tmp_path, [sys.executable, str(script)], nodes=1, terms=terms) as generation:
        expired = generation.wait_event(0, "lease_expired", limit_s=120)
        assert generation.runners[0].wait(timeout=10) == 76
        assert (expired["limit_s"], expired["phase"]) == (save_limit_s, "save")
        assert "8.0 s are allowed in phase save" in generation.events(0, "runner_ended")[0]["detail"]
        told = [line for line in generation.log(0) if line["kind"] in ("phase", "step")]
        saving = [line["at"] for line in told if line.get("phase") == "save"]
        after = next(line for line in told if line.get("step") == 9)
        assert after["at"] - saving[1] > 4 * step_limit_s, "the first long save was let through"
        assert steps(generation, 0)[-1] == 16, "and the endless one was ended"
