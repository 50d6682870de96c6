"""`Run` with phases and a lease, in this process and in forked ones, without a runner: real files, real torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import lines_of
from torch import nn

import everstep
from everstep.checkpoint.manifest import complete_checkpoints

LIMIT_S = 3.0
"""Of the lease: short, and yet more than a busy machine takes for a step or a save of this model."""
TOO_LONG_S = 1.5 * LIMIT_S
SHORT = {"setup_s": 60.0, "compile_s": 60.0, "step_s": LIMIT_S, "save_s": LIMIT_S, "evaluation_s": LIMIT_S}

NEIGHBOUR = struct.pack("<QII", time.clock_gettime_ns(time.CLOCK_BOOTTIME), 2, 9)
"""Slot of local rank 0: in a step, its setup long over."""


@pytest.fixture(autouse=True)
def leased(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The environment of local rank 1 of two, as a runner makes it, with contact just now."""
    for variable in [name for name in os.environ if name.startswith("EVERSTEP_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "progress").write_bytes(NEIGHBOUR + bytes(16))
    (tmp_path / "lease.json").write_text(json.dumps(SHORT))
    (tmp_path / "contact").write_bytes(bytes(8))
    renew(tmp_path)
    for variable, value in {
        "EVERSTEP_CONTACT": tmp_path / "contact",
        "EVERSTEP_PROGRESS": tmp_path / "progress",
        "EVERSTEP_LEASE": tmp_path / "lease.json",
        "EVERSTEP_LOG_DIR": tmp_path / "logs",
        "EVERSTEP_CHECKPOINT_DIR": tmp_path / "checkpoints",
        "EVERSTEP_GENERATION": "1",
        "EVERSTEP_JOB": "job-1",
        "LOCAL_RANK": "1",
    }.items():
        monkeypatch.setenv(variable, str(value))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def renew(root: Path) -> None:
    fd = os.open(root / "contact", os.O_WRONLY)
    os.pwrite(fd, struct.pack("<Q", time.clock_gettime_ns(time.CLOCK_BOOTTIME)), 0)
    os.close(fd)


def slot(root: Path) -> tuple[int, int]:
    """(phase, steps) of local rank 1; the slot of rank 0 is never touched."""
    at_ns, phase, steps = struct.unpack("<QII", (root / "progress").read_bytes()[16:])
    assert (root / "progress").read_bytes()[:16] == NEIGHBOUR
    assert 0 <= time.clock_gettime_ns(time.CLOCK_BOOTTIME) - at_ns < 60e9
    return phase, steps


def start(**options: Any) -> everstep.Run:
    run = everstep.Run(total_steps=5, save_every=100, **options)
    run.track(model=nn.Linear(1, 1), optimizer=None, scheduler=None, sampler=None)
    return run


def story(root: Path) -> list[Any]:
    """The rank's log in short: phases by name, steps by number, the rest by kind.

    Without what became of saves: the writer's word comes when it comes.
    """
    return [
        line["phase"] if line["kind"] == "phase" else line["step"] if line["kind"] == "step" else line["kind"]
        for line in lines_of(log(root))
        if line["kind"] not in ("saved", "rehashed")
    ]


def saved_steps(root: Path) -> list[int]:
    return [line["step"] for line in lines_of(log(root)) if line["kind"] == "saved"]


def log(root: Path) -> Path:
    return root / "logs" / "rank-0.jsonl"


def test_each_change_of_phase_is_told_logged_and_written_to_the_own_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "s"))
        agent.settimeout(5)
        monkeypatch.setenv("EVERSTEP_SOCKET", str(tmp_path / "s"))
        told = []

        def hear() -> None:
            agent.setblocking(False)
            while True:
                try:
                    told.append(json.loads(agent.recv(65536)))
                except BlockingIOError:
                    return

        run = start()
        assert slot(tmp_path) == (0, 0)
        with run.phase("compile"):
            assert slot(tmp_path) == (1, 0)
        run.resume()
        for step in run.steps():
            if step == 1:
                assert slot(tmp_path) == (0, 0), "setup until the first finished step"
            if step == 3:
                assert slot(tmp_path) == (2, 2)
                with run.phase("evaluation"):
                    assert slot(tmp_path) == (4, 2)
                with run.phase("compile"):
                    assert slot(tmp_path) == (2, 2), "compiling once more is part of the step"
            hear()
        hear()
    expected = ["compile", "setup", "save", "setup", "step", "evaluation", "step", "save", "step"]
    assert [frame["phase"] for frame in told if frame["kind"] == "phase"] == expected
    assert {(frame["job"], frame["generation"], frame["rank"]) for frame in told} == {("job-1", 1, 0)}
    assert story(tmp_path) == [
        *["start", "compile", "setup", "resumed", "save", "setup", 1, "step", 2],
        *["evaluation", "step", 3, 4, 5, "save", "step", "finished"],
    ]
    assert saved_steps(tmp_path) == [0, 5]
    assert slot(tmp_path) == (2, 5)


def test_phase_ends_with_its_exception() -> None:
    run = start()
    with pytest.raises(ZeroDivisionError), run.phase("evaluation"):
        _ = 1 / 0
    assert run._phase.word == "setup"


def test_refuses_a_phase_that_is_not_the_scripts_to_enter() -> None:
    with pytest.raises(everstep.UsageError, match="'evaluation' or 'compile'"):
        start().phase("save")  # type: ignore[arg-type]


# --- In a process of its own, which the lease may end -----------------------------------------------------------------


def in_child(work: Any) -> int:
    """Process id of a forked child that runs `work`; it ends with 0 if that returns."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException as err:
        os.write(2, f"child: {type(err).__name__}: {err}\n".encode())
        os._exit(1)


def exit_code_after_freeze(pid: int, *, frozen_s: float) -> int:
    """Wait until the child stops itself, thaw it after a while, and return its exit code."""
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    time.sleep(frozen_s)
    os.kill(pid, signal.SIGCONT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class FreezesWhenSaved(nn.Linear):
    """Stops its process when its state is first taken after enough steps, which is for a save."""

    stopped = False

    def state_dict(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        if self.bias.item() >= 4 and not self.stopped:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().state_dict(*arguments, **options)


def save_while_frozen() -> None:
    run = everstep.Run(total_steps=8, save_every=4)
    model = FreezesWhenSaved(1, 1)
    run.track(model=model, optimizer=None, scheduler=None, sampler=None)
    nn.init.zeros_(model.bias)
    run.resume()
    for step in run.steps():
        nn.init.constant_(model.bias, step)


@pytest.mark.parametrize(("frozen_s", "saved"), [(0.1, True), (TOO_LONG_S, False)])
def test_rank_that_was_frozen_while_saving_puts_no_manifest_in_place(
    tmp_path: Path, frozen_s: float, saved: bool
) -> None:
    code = exit_code_after_freeze(in_child(save_while_frozen), frozen_s=frozen_s)
    assert [m.name.step for m in complete_checkpoints(tmp_path / "checkpoints")] == ([0, 4, 8] if saved else [0])
    assert (4 in saved_steps(tmp_path)) is saved
    assert code == (0 if saved else 76)
    assert (story(tmp_path)[-1] == "lease_expired") is not saved


def freeze_in_step_5() -> None:
    run = start()
    run.resume()
    for step in run.steps():
        if step == 5:
            os.kill(os.getpid(), signal.SIGSTOP)


def test_contact_that_came_back_before_the_rank_was_thawed_does_not_save_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = in_child(freeze_in_step_5)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    time.sleep(TOO_LONG_S)
    renew(tmp_path)
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 76
    assert 5 not in story(tmp_path)
    said = capfd.readouterr().err.splitlines()[-1]
    assert "The lease has run out: no contact with the server and no progress for" in said and f"{LIMIT_S} s" in said


def test_runner_that_looked_on_vouches_for_contact_during_a_long_step(tmp_path: Path) -> None:
    """The rank cannot look while it is in a step; the runner's last judgement says that contact was always there."""
    pid = in_child(freeze_in_step_5)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    time.sleep(TOO_LONG_S)
    renew(tmp_path)
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    (tmp_path / "kept").write_bytes(struct.pack("<QQ", now_ns, int(LIMIT_S * 1e9)))
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert 5 in story(tmp_path)


def test_terms_that_rose_meanwhile_are_read_before_a_rank_ends_itself(tmp_path: Path) -> None:
    pid = in_child(freeze_in_step_5)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    (tmp_path / "lease.tmp").write_text(json.dumps({**SHORT, "step_s": 30.0, "save_s": 30.0}))
    (tmp_path / "lease.tmp").rename(tmp_path / "lease.json")
    time.sleep(TOO_LONG_S)
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert 5 in story(tmp_path)


def test_refuses_to_train_without_the_files_of_its_lease(tmp_path: Path) -> None:
    (tmp_path / "contact").unlink()
    with pytest.raises(everstep.EverstepError, match="cannot be kept"):
        start()
