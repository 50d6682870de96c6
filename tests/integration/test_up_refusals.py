"""What can stand in the way of a start is said in a sentence that tells what to do."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from everstep.cli.broker import LONGEST_SOCKET_PATH, external_broker, find_program, socket_path
from everstep.cli.main import main
from everstep.cli.supervise import SupervisorError


def test_says_that_a_port_is_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["up", "--home", str(tmp_path), "--port", str(port)]) == 1
    assert f"Port {port} on 127.0.0.1 cannot be used" in capsys.readouterr().err


def test_says_that_the_home_is_taken(tmp_path: Path) -> None:
    holder = (
        "import sys, time; from pathlib import Path; from everstep.cli.up import _lock_home\n"
        "held = _lock_home(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        refused = subprocess.run(
            [sys.executable, "-m", "everstep.cli.main", "up", "--home", str(tmp_path), "--port", "0"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        process.kill()
    assert refused.returncode == 1
    assert f"Everstep already runs on {tmp_path} (process {process.pid})" in refused.stderr


def test_says_that_there_is_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 50_000_000))
    assert main(["up", "--home", str(tmp_path), "--port", "0"]) == 1
    assert "50 MB free, at least 300 MB are needed" in capsys.readouterr().err


def test_says_that_the_home_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["up", "--home", str(tmp_path / "file" / "home"), "--port", "0"]) == 1
    assert "Cannot make the folder" in capsys.readouterr().err


def test_puts_the_socket_of_a_deep_home_into_a_short_private_folder(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    path = socket_path(deep)
    try:
        assert len(str(path)) <= LONGEST_SOCKET_PATH
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert socket_path(deep) == path
    finally:
        path.parent.rmdir()


def test_finds_a_broker_program() -> None:
    assert find_program().is_file()


def test_says_what_to_install_where_there_is_no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SupervisorError, match="Install redis-server, or point EVERSTEP_REDIS_URL"):
        find_program()


def test_prefers_a_broker_that_the_environment_names() -> None:
    assert external_broker({"REDIS_URL": "redis://a", "EVERSTEP_REDIS_URL": "redis://b"}) == "redis://b"
    assert external_broker({"REDIS_URL": "redis://a"}) == "redis://a"
    assert external_broker({}) == ""
