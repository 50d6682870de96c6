"""`EVERSTEP_DATABASE_URL` as Django's settings: where the server is, and how long its silence may hold us up."""

from __future__ import annotations

from dashboard.settings import _database


def test_url_names_account_place_and_database() -> None:
    found = _database("postgresql://ever%40step:a%2Fb@db.example:6432/runs")
    assert (found["USER"], found["PASSWORD"], found["HOST"], found["PORT"], found["NAME"]) == (
        "ever@step", "a/b", "db.example", 6432, "runs",
    )  # fmt: skip


def test_host_may_be_the_folder_of_a_socket() -> None:
    assert _database("postgresql://postgres@%2Frun%2Fpostgresql/runs")["HOST"] == "/run/postgresql"


def test_server_that_vanished_and_locks_of_a_process_that_stands_still_have_limits() -> None:
    options = _database("postgresql://db/runs")["OPTIONS"]
    assert options["connect_timeout"] <= 10
    assert options["tcp_user_timeout"] <= 30_000
    assert "lock_timeout=15s" in options["options"]
    assert "idle_in_transaction_session_timeout=15s" in options["options"]


def test_query_of_the_url_goes_to_libpq_and_wins() -> None:
    options = _database("postgresql://db/runs?sslmode=verify-full&connect_timeout=2&options=")["OPTIONS"]
    assert options["sslmode"] == "verify-full"
    assert options["connect_timeout"] == "2"
    assert options["options"] == "", "a pooler may refuse them"


def test_what_is_stored_stays_stored_whatever_the_servers_default() -> None:
    assert "synchronous_commit=on" in _database("postgresql://db/runs")["OPTIONS"]["options"]
