"""Fences and the control plane on the command line, against a real server over HTTP."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.main import main
from recovery.access import create_api_token
from recovery.models import FenceAction, GenerationRow, IncidentRow, Job, Node
from tests.integration.api_rows import (
    make_control_plane_incident,
    make_generation,
    make_incident,
    make_job,
    make_node,
    make_user,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def server(live_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_SERVER", live_server.url)
    monkeypatch.setenv("EVERSTEP_TOKEN", create_api_token(user=make_user(), name="cli"))
    job = make_job(generation=1)
    nodes = [make_node("gpu-01"), make_node("gpu-02", last_heard_at=time.time() - 60, boot_id="boot-2")]
    make_generation(job, 1, nodes, reached=10)
    GenerationRow.objects.update(run_ordered_at=1.0)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_lost_node_is_listed_shown_and_attested(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "node", "list")
    assert [line.split()[:3] for line in out.splitlines()][2] == ["gpu-02", "unknown", "lost"]
    _, out, _ = run(capsys, "node", "show", "gpu-02")
    assert "contact:" in out and "lost, silent for 1 min" in out
    assert "generation 1 of name of job_a" in out
    attest = ("node", "attest", "gpu-02", "--powered-off", "--confirm", "gpu-02", "--statement", "pulled the plug")
    code, out, _ = run(capsys, *attest)
    assert (code, "that gpu-02 is powered off: 'pulled the plug'." in out) == (0, True)
    _, out, _ = run(capsys, "node", "show", "gpu-02")
    assert "attestation by operator: fenced" in out
    assert "generation 1 of name of job_a (fenced by attestation)" in out
    code, _, err = run(capsys, *attest)
    assert (code, "Nothing waits for a proof of gpu-02" in err) == (1, True)


def test_attestation_says_what_it_attests_and_names_the_node_twice(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--confirm", "gpu-02"), ("--powered-off",)):
        with pytest.raises(SystemExit) as ended:
            main(["node", "attest", "gpu-02", *words])
        assert ended.value.code == 2
    code, _, err = run(capsys, "node", "attest", "gpu-02", "--powered-off", "--confirm", "gpu-01")
    assert (code, "exact name, gpu-02" in err) == (2, True)
    code, _, err = run(capsys, "node", "attest", "none", "--powered-off", "--confirm", "none")
    assert (code, "no node none" in err) == (3, True)
    assert not FenceAction.objects.exists()


def test_provider_is_asked(capsys: pytest.CaptureFixture[str], settings: Any) -> None:
    settings.EVERSTEP_FENCE_COMMAND = []
    code, _, err = run(capsys, "node", "fence", "gpu-02", "--confirm", "gpu-02")
    assert (code, "no fence provider is configured" in err) == (1, True)
    settings.EVERSTEP_FENCE_COMMAND = ["/bin/false"]
    code, out, _ = run(capsys, "node", "fence", "gpu-02", "--confirm", "gpu-02")
    assert (code, "everstep node show gpu-02" in out) == (0, True)
    FenceAction.objects.update(attempts=2, evidence="`false off` ended with code 1.", contradicted_at=time.time())
    _, out, _ = run(capsys, "node", "show", "gpu-02")
    assert "provider by operator: requested, attempt 2" in out
    assert "`false off` ended with code 1." in out
    assert "WRONG: the node was heard again in the same boot" in out


def test_incident_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    GenerationRow.objects.update(wanted="stop")
    incident = make_incident(Job.objects.get(), state="waiting_for_fence", opened_at=time.time() - 30)
    incident.body.pop("plan")
    incident.save()
    code, out, _ = run(capsys, "incident", "show", "inc_a")
    assert code == 0
    assert "waiting_for_fence - a human is needed" in out
    assert "gpu-01, generation 1, in contact: its agent stops what is left" in out
    assert "it comes back or reboots; or everstep node attest gpu-02 --powered-off --confirm gpu-02" in out
    run(capsys, "node", "attest", "gpu-02", "--powered-off", "--confirm", "gpu-02")
    _, out, _ = run(capsys, "incident", "show", "inc_a")
    assert "+ gpu-02, generation 1: attestation - operator attested at" in out


def test_incident_of_the_control_plane_is_shown_and_rearmed(capsys: pytest.CaptureFixture[str]) -> None:
    make_control_plane_incident()
    _, out, _ = run(capsys, "incident", "list")
    assert "(control plane)" in out and "2 of 3 nodes fell silent at once" in out
    _, out, _ = run(capsys, "incident", "show", "inc_plane")
    assert "still silent:" in out and "everstep incident rearm inc_plane" in out
    code, out, _ = run(capsys, "incident", "rearm", "inc_plane")
    assert (code, "is rearmed" in out) == (0, True)
    assert IncidentRow.objects.get().ended
    code, _, err = run(capsys, "incident", "rearm", "inc_plane")
    assert (code, "re-armed already" in err) == (1, True)
    assert run(capsys, "incident", "rearm", "inc_none")[0] == 3


def test_job_is_submitted_with_a_range_and_shows_nodes_that_are_not_in_contact(
    capsys: pytest.CaptureFixture[str],
) -> None:
    submit = ("job", "submit", "--checkpoint-dir", "c", "--nodes", "2..4", "--multiple-of", "2", "--save-limit", "90")
    code, out, _ = run(capsys, *submit, "-o", "json", "--", sys.executable, "train.py")
    job = json.loads(out)
    assert (code, job["nodes_min"], job["nodes_max"], job["phase_limits_s"]) == (0, 2, 4, {"save_s": 90.0})
    _, out, _ = run(capsys, "job", "show", job["id"])
    assert "may shrink to" in out
    _, out, _ = run(capsys, "job", "show", "job_a")
    assert "gpu-02 (lost, silent for 1 min" in out
    assert "whether its ranks train is not known" in out
    assert Node.objects.count() == 2
