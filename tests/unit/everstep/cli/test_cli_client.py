"""Where address and token come from, and that a token never leaves by an argument."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from everstep.cli.client import Access, WrongUsage, find_access
from everstep.cli.main import COMMANDS, build_parser, main

SERVER = "http://127.0.0.1:8400"


def keep(home: Path, *, server: str = SERVER, token: str = "kept", mode: int = 0o600) -> dict[str, str]:
    path = home / "client.json"
    path.write_text(json.dumps({"server": server, "token": token}))
    path.chmod(mode)
    return {"EVERSTEP_HOME": str(home)}


def test_kept_credentials_are_used_where_nothing_else_is_given(tmp_path: Path) -> None:
    environment = keep(tmp_path, server=f"{SERVER}/")
    assert find_access(server=None, token_file=None, environment=environment) == Access(SERVER, "kept")


def test_environment_wins_over_the_file_and_arguments_over_both(tmp_path: Path) -> None:
    environment = keep(tmp_path) | {"EVERSTEP_SERVER": "https://one.example", "EVERSTEP_TOKEN": "from-environment\n"}
    found = find_access(server=None, token_file=None, environment=environment)
    assert found == Access("https://one.example", "from-environment")
    token_file = tmp_path / "token"
    token_file.write_text("from-file\n")
    found = find_access(server="https://two.example/", token_file=token_file, environment=environment)
    assert found == Access("https://two.example", "from-file")


def test_kept_token_is_not_sent_to_another_server(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match=r"No API token for https://evil\.example"):
        find_access(server="https://evil.example", token_file=None, environment=keep(tmp_path))


def test_kept_token_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    warnings = io.StringIO()
    find_access(server=None, token_file=None, environment=keep(tmp_path, mode=0o644), warnings=warnings)
    assert "chmod 600" in warnings.getvalue()


@pytest.mark.parametrize("server", ["ftp://x", "file:///etc/passwd", "127.0.0.1:8400", "http://"])
def test_address_that_is_none_is_wrong_usage(server: str, tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="no address"):
        find_access(server=server, token_file=None, environment={"EVERSTEP_HOME": str(tmp_path)})


def test_damaged_file_is_told_and_not_taken_for_no_file(tmp_path: Path) -> None:
    environment = keep(tmp_path)
    (tmp_path / "client.json").write_text("{")
    with pytest.raises(WrongUsage, match="write it anew"):
        find_access(server=None, token_file=None, environment=environment)


def test_nothing_known_says_all_three_ways(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match=r"--server, EVERSTEP_SERVER or .*client\.json"):
        find_access(server=None, token_file=None, environment={"EVERSTEP_HOME": str(tmp_path)})


def test_no_command_takes_a_token_as_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("job list", "incident show", "drill run", "node list"):
        with pytest.raises(SystemExit):
            main([*verb.split(), "--help"])
        assert "--token " not in capsys.readouterr().out


def test_help_documents_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"\n  {code}  " in text for code in range(6))
    assert all(command in text for command in COMMANDS)


def test_wrong_usage_ends_with_2_and_unreachable_server_with_4(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("everstep.cli.client.time.sleep", waits.append)
    monkeypatch.chdir(tmp_path)
    for name in ("EVERSTEP_HOME", "EVERSTEP_SERVER", "EVERSTEP_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert main(["node", "list"]) == 2
    monkeypatch.setenv("EVERSTEP_TOKEN", "x")
    assert main(["node", "list", "--server", "http://127.0.0.1:9"]) == 4
    assert waits == [0.25, 0.5, 1, 2]
    assert "Is the server up?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["job", "incident", "drill", "node"])
@pytest.mark.parametrize("limit", ["0", "-1", "many"])
def test_list_of_no_items_is_wrong_usage(command: str, limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "list", "--limit", limit])
    assert ended.value.code == 2
    assert "1 or more" in capsys.readouterr().err


def test_only_the_named_command_is_loaded() -> None:
    parser = build_parser(["node", "list"])
    assert parser.parse_args(["node", "list"]).run.__module__ == "everstep.cli.nodes"
    with pytest.raises(SystemExit):
        parser.parse_args(["job", "list"])
