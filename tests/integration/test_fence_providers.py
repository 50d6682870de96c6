"""The fence command as real processes: what it says, what it does not say, and what is left of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recovery.fence_providers import CommandFenceProvider, FencedNode, configured_provider
from tests.integration.launches import has_ended, wait_until

NODE = FencedNode(name="gpu-07", address="10.0.0.7")


def script(folder: Path, body: str) -> str:
    path = folder / "fence"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_exit_code_0_and_off_as_last_line_say_off(tmp_path: Path) -> None:
    command = script(tmp_path, f'echo "$@" > {tmp_path}/asked; echo Chassis Power Control: Down/Off; echo off')
    provider = CommandFenceProvider([command, "--host", "{address}", "bmc-{node}"], timeout_s=10)
    result = provider.power_off(NODE)
    assert result.off
    assert (tmp_path / "asked").read_text() == "--host 10.0.0.7 bmc-gpu-07 off\n"
    assert "bmc-gpu-07 off` ended with code 0; the last line of its output was 'off'" in result.evidence


def test_status_asks_without_switching(tmp_path: Path) -> None:
    provider = CommandFenceProvider([script(tmp_path, 'test "$1" = status && echo on')], timeout_s=10)
    result = provider.status(NODE)
    assert (result.off, "'on'" in result.evidence) == (False, True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo off; echo Chassis Power is on", "'Chassis Power is on'"),
        ("echo power off", "'power off'"),
        ("echo off; exit 1", "ended with code 1"),
        ("true", "''"),
        ("echo no session >&2; exit 3", "Its last complaint was 'no session'"),
        ("kill -9 $$", "ended with code -9"),
    ],
)
def test_anything_else_says_nothing(tmp_path: Path, body: str, words: str) -> None:
    result = CommandFenceProvider([script(tmp_path, body)], timeout_s=10).power_off(NODE)
    assert (result.off, words in result.evidence) == (False, True), result.evidence


def test_command_that_is_not_there_is_told_and_does_not_raise(tmp_path: Path) -> None:
    result = CommandFenceProvider([str(tmp_path / "none")], timeout_s=10).power_off(NODE)
    assert (result.off, "could not be started: No such file or directory" in result.evidence) == (False, True)


def test_command_that_hangs_is_killed_at_its_limit_with_its_children(tmp_path: Path) -> None:
    body = f"sleep 600 & echo $! > {tmp_path}/child; echo off; sleep 600"
    began = time.monotonic()
    result = CommandFenceProvider([script(tmp_path, body)], timeout_s=0.5).power_off(NODE)
    assert (result.off, "did not end within 0.5 s" in result.evidence) == (False, True)
    assert time.monotonic() - began < 10
    assert has_ended(int((tmp_path / "child").read_text()), limit_s=5)


def test_what_the_command_leaves_running_is_killed_and_does_not_hold_up_its_answer(tmp_path: Path) -> None:
    body = f"sleep 600 & echo $! > {tmp_path}/child; echo off"
    began = time.monotonic()
    assert CommandFenceProvider([script(tmp_path, body)], timeout_s=60).power_off(NODE).off
    assert time.monotonic() - began < 30
    assert has_ended(int((tmp_path / "child").read_text()), limit_s=5)


def test_command_dies_with_the_worker_that_watches_over_it(tmp_path: Path) -> None:
    command = script(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    code = (
        "from recovery.fence_providers import CommandFenceProvider, FencedNode\n"
        f"CommandFenceProvider([{command!r}], timeout_s=600).power_off(FencedNode(name='n', address='a'))\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2])
    try:
        pid = int(wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()))
        worker.send_signal(signal.SIGKILL)
        assert has_ended(pid, limit_s=5)
    finally:
        worker.kill()
        worker.wait()


def test_address_that_could_be_read_as_an_option_is_not_passed_on(tmp_path: Path) -> None:
    command = script(tmp_path, f"touch {tmp_path}/ran; echo off")
    hostile = FencedNode(name="gpu-07", address="--all-nodes")
    result = CommandFenceProvider([command, "{address}"], timeout_s=10).power_off(hostile)
    assert (result.off, (tmp_path / "ran").exists()) == (False, False)
    assert "'--all-nodes' is no address" in result.evidence
    assert CommandFenceProvider([command, "{node}"], timeout_s=10).power_off(hostile).off


def test_secrets_of_the_server_are_not_in_the_environment_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_SECRET_KEY", "abc")
    monkeypatch.setenv("BMC_PASSWORD_FILE", "/etc/bmc")
    command = script(tmp_path, 'test -z "$EVERSTEP_SECRET_KEY" && test "$BMC_PASSWORD_FILE" = /etc/bmc && echo off')
    assert CommandFenceProvider([command], timeout_s=10).power_off(NODE).off


def test_without_a_command_there_is_no_provider(settings: object) -> None:
    settings.EVERSTEP_FENCE_COMMAND = []  # type: ignore[attr-defined]
    assert configured_provider() is None
