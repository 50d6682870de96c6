from __future__ import annotations

from pathlib import Path

from everstep.checkpoint.left_overs import unfinished_saves
from everstep.checkpoint.manifest import MANIFEST, CheckpointName


def test_names_saves_without_a_manifest_that_are_newer_than_what_is_resumed(tmp_path: Path) -> None:
    for place in (
        "generation-00001/step-00000002",
        "generation-00001/step-00000004",
        "generation-00001/.writing-step-00000006-1a2b3c4d",
        "generation-00002/.writing-step-00000006-77aa",
        "generation-00002/step-00000008",
        "generation-00002/notes",
    ):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "generation-00001/step-00000002" / MANIFEST).write_text("{}")
    (tmp_path / "generation-00002/step-00000008" / MANIFEST).write_text("{}")
    assert [str(name) for name in unfinished_saves(tmp_path, after=None)] == ["1:4", "1:6", "2:6"]
    assert [str(name) for name in unfinished_saves(tmp_path, after=CheckpointName(generation=1, step=4))] == [
        "1:6",
        "2:6",
    ]
    assert unfinished_saves(tmp_path / "nowhere", after=None) == []
