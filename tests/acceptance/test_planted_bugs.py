"""A slice of `make planted-bugs`: real jobs that are killed and resumed wrongly, judged by the product's own rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planted_bugs.bugs import BUGS
from planted_bugs.proof import MODES, Mode, clean_resumes, planted_resumes
from planted_bugs.training import PARENT_STEP, Case, Plant, lose, resume, warm_up
from planted_bugs.verdicts import judge_logs

from everstep.checkpoint.manifest import CheckpointName
from recovery.domain import continuity

SEED = 7


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    warm_up()
    assert torch.get_num_threads() == 1, "ranks are forked from here"


@pytest.mark.parametrize("mode", [MODES[0], MODES[-1]], ids=str)
def test_bug_in_the_resume_is_found_and_named(mode: Mode) -> None:
    slice_of_bugs = ["optimizer not restored", "one sample skipped, counter goes on", "weights frozen"]
    results = list(planted_resumes(mode, seed=SEED, only=slice_of_bugs))
    assert len(results) == 3
    assert [result for result in results if not result.found] == []


def test_case_R17_rank_that_found_another_checkpoint_is_named_before_the_first_step(tmp_path: Path) -> None:
    case = Case(seed=SEED)
    lose(case, tmp_path)
    resume(case, tmp_path, BUGS["one rank at another step"](case))
    outcome = judge_logs(case, tmp_path)
    assert outcome.alarm is not None and outcome.alarm.steps_compared == 0
    assert "Rank 1 resumed at step 10; the plan says 20: the rank is at another step." in outcome.alarm.findings


def test_case_R10_corrupted_tensor_is_refused_before_the_first_step(tmp_path: Path) -> None:
    case = Case(seed=SEED, world_size=1)
    lose(case, tmp_path)
    directory = CheckpointName(generation=1, step=PARENT_STEP).directory(tmp_path / "checkpoints")
    tensors = max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = tensors.read_bytes()
    middle = len(content) // 2
    tensors.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(RuntimeError, match=r"CheckpointDamaged"):
        resume(case, tmp_path, Plant(case))
    assert '"kind": "step"' not in (tmp_path / "generation-2" / "rank-0.jsonl").read_text()


def test_case_R10_tensor_that_arrives_corrupted_is_named() -> None:
    (result,) = planted_resumes(MODES[-1], seed=SEED, only=["one tensor corrupted"])
    assert result.found, result.said


def test_clean_resumes_raise_no_alarm() -> None:
    assert [result for result in clean_resumes(MODES, seed=SEED, count=8) if result.found] == []


def test_the_proof_sees_a_rule_that_finds_nothing_and_one_that_is_never_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as blind:
        blind.setattr(continuity, "_digest_findings", lambda resumes: (("model",), []))
        (result,) = planted_resumes(MODES[-1], seed=SEED, only=["RNG not restored"])
        assert not result.found
    monkeypatch.setattr(continuity, "noise_band", lambda reference: 1e-9)
    (clean,) = clean_resumes([Mode(False, 1e-3)], seed=SEED, count=1)
    assert clean.found and "the band is 1e-09" in clean.said
