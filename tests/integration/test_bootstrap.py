"""`manage.py bootstrap`: what a fresh installation gets, and that a second run changes nothing."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path

import pytest
from django.contrib.auth import authenticate
from django.contrib.auth.models import User
from django.core.management import call_command

from dashboard.management.commands import bootstrap
from recovery.access import join_node, user_for_api_token
from recovery.errors import JoinRefused
from recovery.models import ApiToken

pytestmark = pytest.mark.django_db


class Home:
    def __init__(self, home: Path) -> None:
        self.home = home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bootstrap, "env", Home(tmp_path))
    return tmp_path


def run(*arguments: str) -> str:
    out = io.StringIO()
    call_command("bootstrap", *arguments, stdout=out)
    return out.getvalue()


def test_tells_a_random_password_once(home: Path) -> None:
    first = run()
    password = first.split()[-1]
    assert authenticate(username="operator", password=password) is not None
    assert run() == ""
    assert authenticate(username="operator", password=password) is not None
    assert not (home / "login.json").exists()


def test_keeps_the_log_in_of_a_demo_and_tells_it_each_time(home: Path) -> None:
    assert run("--keep-login") == run("--keep-login")
    kept = json.loads((home / "login.json").read_text())
    assert authenticate(username=kept["user"], password=kept["password"]) is not None
    assert stat.S_IMODE((home / "login.json").stat().st_mode) == 0o600


def test_makes_a_new_log_in_when_the_kept_one_is_wrong(home: Path) -> None:
    run("--keep-login")
    user = User.objects.get(username="operator")
    user.set_password("another one")
    user.save()
    run("--keep-login")
    kept = json.loads((home / "login.json").read_text())
    assert authenticate(username="operator", password=kept["password"]) is not None


def test_takes_a_given_password(home: Path) -> None:
    run("--password", "from the vault")
    assert authenticate(username="operator", password="from the vault") is not None


def test_keeps_an_api_token_that_works_and_renews_one_that_does_not(home: Path) -> None:
    run("--server", "http://127.0.0.1:1")
    first = json.loads((home / "client.json").read_text())
    run("--server", "http://127.0.0.1:2")
    second = json.loads((home / "client.json").read_text())
    assert second == {"server": "http://127.0.0.1:2", "token": first["token"]}
    ApiToken.objects.update(revoked=True)
    run("--server", "http://127.0.0.1:2")
    third = json.loads((home / "client.json").read_text())
    assert third["token"] != first["token"]
    assert user_for_api_token(third["token"]) is not None
    assert stat.S_IMODE((home / "client.json").stat().st_mode) == 0o600


def test_makes_join_tokens_that_fit_one_node_and_revokes_unused_ones(home: Path) -> None:
    run("--join", "gpu-01")
    unused = (home / "join" / "gpu-01.token").read_text()
    run("--join", "gpu-01", "gpu-02")
    with pytest.raises(JoinRefused):
        join_node(token=unused, node_name="gpu-01")
    token = (home / "join" / "gpu-01.token").read_text()
    with pytest.raises(JoinRefused):
        join_node(token=token, node_name="gpu-02")
    assert join_node(token=token, node_name="gpu-01")
    assert stat.S_IMODE((home / "join" / "gpu-02.token").stat().st_mode) == 0o600
