"""The command line against a real server over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.drills import follow
from everstep.cli.main import main
from recovery.access import create_api_token
from recovery.models import Drill, IdempotencyRecord, IncidentRow, Job, Node
from tests.integration.api_rows import (
    add_entries,
    make_drill,
    make_generation,
    make_incident,
    make_job,
    make_story,
    make_user,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def server(live_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_SERVER", live_server.url)
    monkeypatch.setenv("EVERSTEP_TOKEN", create_api_token(user=make_user(), name="cli"))
    return str(live_server.url)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_job_is_submitted_listed_shown_and_stopped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    submit = ("job", "submit", "--checkpoint-dir", "c", "-o", "json", "--", sys.executable, "train.py", "-x")
    code, out, _ = run(capsys, *submit)
    job = json.loads(out)
    assert (code, job["name"], job["argv"]) == (0, "train", [sys.executable, "train.py", "-x"])
    assert job["working_directory"] == str(tmp_path.resolve())
    code, out, _ = run(capsys, "job", "list")
    assert code == 0
    assert out.splitlines()[0].split()[:3] == ["ID", "NAME", "STATE"]
    assert job["id"] in out
    code, out, _ = run(capsys, "job", "show", job["id"])
    assert (code, "No generation was launched yet." in out) == (0, True)
    code, out, _ = run(capsys, "job", "stop", job["id"])
    assert (code, Job.objects.get().stop_wanted) == (0, True)
    assert "will stop" in out
    assert IdempotencyRecord.objects.count() == 2


def test_lists_without_rows_say_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert "everstep agent" in run(capsys, "node", "list")[1]
    assert "everstep job submit" in run(capsys, "job", "list")[1]
    assert "everstep drill run" in run(capsys, "drill", "list")[1]
    assert run(capsys, "incident", "list", "-o", "json")[1].strip() == "[]"


def test_state_that_there_is_not_is_wrong_usage_and_told_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "job", "list", "--state", "bogus")
    assert (code, out) == (2, "")
    assert err.startswith("everstep: --state: ")
    assert "'running'" in err and "'stopped'" in err


def test_list_that_a_filter_leaves_empty_does_not_say_that_there_is_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = make_job(state="running")
    assert run(capsys, "job", "list", "--state", "failed")[1] == "There are no jobs in state failed.\n"
    assert run(capsys, "drill", "list", "--job", job.id)[1] == f"There were no drills on job {job.id}.\n"


def test_list_crosses_pages(capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(203):
        make_job(f"job_{index:03}")
    _, out, _ = run(capsys, "job", "list", "--limit", "202", "-o", "json")
    assert [job["id"] for job in json.loads(out)] == [f"job_{index:03}" for index in range(202, 0, -1)]


def test_incident_is_readable_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    job, _ = make_story()
    make_incident(job, "inc_b")
    code, out, _ = run(capsys, "incident", "show", "inc_a")
    assert code == 0
    for sentence in (
        "Rank 1 on gpu-02 was killed by SIGKILL.",
        "verifying              6.00 s",
        "17:46:40.6Z ! Rank 1",
        "Receipt: recovered, continuity bit-equal",
        "54 replayed steps are bit-equal on every rank.",
        "step 100 of generation 1",
    ):
        assert sentence in out
    assert "\x1b" not in out
    _, out, _ = run(capsys, "incident", "show", "inc_a", "-o", "json")
    shown = json.loads(out)
    assert (len(shown["timeline"]), shown["receipt"]["verdict"]["kind"]) == (8, "bit-equal")
    _, out, _ = run(capsys, "incident", "list", "--open", "-o", "json")
    assert [one["id"] for one in json.loads(out)] == ["inc_b"]


def test_incident_counts_attempts_as_its_receipt_does(capsys: pytest.CaptureFixture[str]) -> None:
    job, incident = make_story()

    def counted(incident_id: str) -> list[str]:
        lines = run(capsys, "incident", "show", incident_id)[1].splitlines()
        return [line.split()[-1] for line in lines if line.split()[:1] == ["attempts:"]]

    assert incident.receipt["attempts"] == 1
    assert counted("inc_a") == ["1", "1"]
    planned = {**incident.body, "plans_made": 3}
    make_incident(job, "inc_b", state="escalated", body={**planned, "attempt": 3})
    assert counted("inc_b") == ["3"], "the third attempt was the last one"
    IncidentRow.objects.filter(pk="inc_b").update(ended=True)
    make_incident(job, "inc_c", body={**incident.body, "plan": None, "plans_made": 0})
    assert counted("inc_c") == [], "nothing is planned yet"


def test_phase_over_its_limit_is_flagged_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    incident = make_incident(make_job())
    add_entries(incident, (0, "state", "Opened.", {"to": "detected"}), (31, "state", "Stopping.", {"to": "stopping"}))
    _, out, _ = run(capsys, "incident", "show", "inc_a")
    assert "detected               31.0 s - over its limit of 30.0 s" in out


def test_nodes_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    make_story()
    _, out, _ = run(capsys, "node", "list")
    assert [line.split() for line in out.splitlines()][2][:2] == ["gpu-02", "ready"]
    _, out, _ = run(capsys, "node", "show", "gpu-01")
    assert "state:" in out and "busy" in out


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_drill_that_is_waited_for_ends_with_its_outcome(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, passed: bool, code: int
) -> None:
    job, _ = make_story()
    IncidentRow.objects.update(ended=True)

    def recover(_: float) -> None:
        """In place of the wait between two looks: the drill and its incident end."""
        result = {"passed": passed, "reasons": [] if passed else ["Recovery took 900 s; promised were 120 s."]}
        drill = Drill.objects.get()
        IncidentRow.objects.update(drill=drill)
        Drill.objects.update(ended=True, state="passed" if passed else "failed", result=result)

    assert follow.__kwdefaults__ is not None
    monkeypatch.setitem(follow.__kwdefaults__, "sleep", recover)
    got, out, _ = run(capsys, "drill", "run", "--job", job.id, "--rank", "1", "--wait", "--timeout", "20")
    assert got == code
    assert "17:46:46.0Z > Verifying." in out
    assert "Receipt: recovered, continuity bit-equal" in out
    assert ("promised were 120 s" in out) == (not passed)


def test_drill_that_does_not_end_in_time_ends_with_5(capsys: pytest.CaptureFixture[str]) -> None:
    job, _ = make_story()
    code, _, err = run(capsys, "drill", "run", "--job", job.id, "--wait", "--timeout", "0")
    assert (code, "it goes on" in err) == (5, True)


def test_drill_is_shown_without_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    job, _ = make_story()
    make_drill(job, Node.objects.get(name="gpu-02"), ended=True, state="expired", detail="Too late.")
    code, out, _ = run(capsys, "drill", "show", "drl_a")
    assert (code, "Drill expired. Too late." in out) == (0, True)


def test_refused_is_1_and_not_found_is_3_with_the_sentence_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    make_job(state="pending")
    code, _, err = run(capsys, "drill", "run", "--job", "job_a")
    assert (code, "steady state" in err) == (1, True)
    code, _, err = run(capsys, "job", "show", "job_none")
    assert (code, err) == (3, "everstep: There is no job job_none.\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "0"), "--nodes: Input should be greater than or equal to 1."),
        (("--nodes", "0..4"), "--nodes min: Input should be greater than or equal to 1."),
        (("--nodes", "2..4", "--multiple-of", "0"), "--multiple-of: Input should be greater than or equal to 1."),
        (("--total-steps", "0"), "--total-steps: Input should be greater than or equal to 1."),
        (("--save-limit", "1"), "--save-limit: Input should be greater than or equal to 2."),
        (("--nodes", "4..2"), "nodes: min is 4 and max is 2; min must not be above max."),
    ],
)
def test_job_that_no_server_would_take_is_wrong_usage_and_told_by_its_options(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, out, err = run(capsys, "job", "submit", "--checkpoint-dir", "c", *words, "--", sys.executable, "t.py")
    assert (code, out, err) == (2, "", f"everstep: {said}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--kind", "bogus"), "'bogus' is no drill; known are kill-rank, "),
        (("--duration", "9"), "has no duration"),
        (("--kind", "partition", "--duration", "900"), "--duration: Input should be less than or equal to 600."),
        (("--within", "0"), "--within: Input should be greater than 0."),
    ],
)
def test_drill_that_never_can_be_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    job, _ = make_story()
    IncidentRow.objects.update(ended=True)
    code, _, err = run(capsys, "drill", "run", "--job", job.id, *words)
    assert (code, said in err) == (2, True), err


def test_wrong_token_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_TOKEN", "est_api_wrong")
    code, _, err = run(capsys, "node", "list")
    assert (code, "does not know this API token" in err) == (1, True)


def test_request_whose_answer_was_lost_is_sent_again_and_has_one_effect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from urllib.request import OpenerDirector

    really_open, lost = OpenerDirector.open, []

    def lose_the_first(self: OpenerDirector, request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = really_open(self, request, *args, **kwargs)
        if not lost:
            lost.append(answer.read())
            answer.close()
            raise ConnectionResetError("the connection broke before the answer")
        return answer

    monkeypatch.setattr(OpenerDirector, "open", lose_the_first)
    code, _, _ = run(capsys, "job", "submit", "--checkpoint-dir", "c", "--", sys.executable, "t.py")
    assert (code, len(lost), Job.objects.count()) == (0, 1, 1)


def test_command_runs_where_no_server_package_can_be_imported(server: str) -> None:
    """As in a job's own environment: the standard library and everstep, nothing else."""
    make_generation(make_job(), 1, [])
    block = (
        "import sys\n"
        "for name in ('django', 'torch', 'agents', 'recovery', 'dashboard', 'celery', 'msgspec', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "from everstep.cli.main import main\n"
        "sys.exit(main(['job', 'list']))\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=60, cwd=root)
    assert (done.returncode, "job_a" in done.stdout) == (0, True), done.stderr
