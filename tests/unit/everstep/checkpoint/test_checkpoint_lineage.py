"""Which checkpoints belong to the line of training, which are chosen, and which are removed."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from everstep.checkpoint.lineage import (
    line_of,
    newest_checkpoint,
    newest_generation,
    read_lineage,
    record_lineage,
    recorded_parents,
)
from everstep.checkpoint.manifest import (
    CheckpointName,
    Manifest,
    complete_checkpoints,
    read_manifest,
    write_manifest,
)
from everstep.checkpoint.retention import PINNED, choose_expired, pinned_by_server, remove_expired
from everstep.checkpoint.sealed import put_sealed, read_sealed
from everstep.errors import CheckpointDamaged, CheckpointMissing


def name(text: str) -> CheckpointName:
    return CheckpointName.parse(text)


def manifest(text: str, parent: str | None = None) -> Manifest:
    return Manifest(
        name=name(text),
        parent=name(parent) if parent else None,
        job="j1",
        total_steps=100,
        world_size=1,
        created_at=0.0,
        torch_version="2",
        files=(),
    )


def put(root: Path, text: str, parent: str | None = None) -> Path:
    directory = name(text).directory(root)
    directory.mkdir(parents=True)
    write_manifest(directory, manifest(text, parent), may_publish=lambda: None)
    return directory


def test_names_are_those_of_the_contract(tmp_path: Path) -> None:
    assert name("1:60").directory(tmp_path) == tmp_path / "generation-00001" / "step-00000060"
    assert put(tmp_path, "1:60").joinpath("manifest.json").is_file()


def test_manifest_survives_the_file(tmp_path: Path) -> None:
    assert read_manifest(put(tmp_path, "2:40", parent="1:20")) == manifest("2:40", parent="1:20")


def test_directory_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    put(tmp_path, "1:20")
    (put(tmp_path, "1:40") / "manifest.json").unlink()
    assert [m.name for m in complete_checkpoints(tmp_path)] == [name("1:20")]
    with pytest.raises(CheckpointMissing, match="no complete checkpoint"):
        read_manifest(name("1:40").directory(tmp_path))


def test_any_changed_or_missing_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    path = put(tmp_path, "1:20") / "manifest.json"
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        for broken in (whole[:position], whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]):
            path.write_bytes(broken)
            try:
                assert read_manifest(path.parent) == manifest("1:20"), "a change of white space is harmless"
            except CheckpointDamaged:
                assert complete_checkpoints(tmp_path) == []


def test_checkpoint_moved_to_another_name_does_not_count(tmp_path: Path) -> None:
    renamed = put(tmp_path, "1:20").rename(tmp_path / "generation-00001" / "step-00000040")
    assert complete_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointDamaged, match=r"holds checkpoint 1:20, which belongs into .*: it was renamed"):
        read_manifest(renamed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "20"), ("step", -1), ("step", True), ("step", 1 << 70), ("parent", "1:4"), ("parent", {"step": 1}),
        ("world_size", 1.0), ("total_steps", None), ("created_at", math.nan), ("created_at", math.inf), ("job", 7),
        ("created_at", 10**400), ("files", "all"), ("files", [7]), ("files", None), ("torch_version", None),
        ("files", [{"name": "x", "size_bytes": -1, "sha256": None}]), ("format", 1), ("format", None),
        ("files", [{"name": "x", "size_bytes": 1, "sha256": None, "mode": 7}]),
        ("files", [{"name": 7, "size_bytes": 1, "sha256": None}]),
    ],
)  # fmt: skip
def test_manifest_that_says_the_impossible_is_damaged_whatever_its_hash(
    tmp_path: Path, field: str, value: object
) -> None:
    directory = put(tmp_path, "1:20")
    body = {**read_sealed(directory / "manifest.json"), field: value}
    put_sealed(directory / "manifest.json", body)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json cannot be read"):
        read_manifest(directory)
    assert complete_checkpoints(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"7", b"[]", b"\xff", b"[" * 100_000, b'{"format": 2}', b'{"a": 1'])
def test_manifest_that_is_none_is_damaged(tmp_path: Path, content: bytes) -> None:
    directory = put(tmp_path, "1:20")
    (directory / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json cannot be read"):
        read_manifest(directory)


def test_manifest_in_whose_place_something_endless_lies_is_damaged_and_not_waited_for(tmp_path: Path) -> None:
    directory = put(tmp_path, "1:20")
    path = directory / "manifest.json"
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path), os.mkdir):
        path.rmdir() if path.is_dir() else path.unlink()
        make(path)
        with pytest.raises(CheckpointDamaged, match=r"manifest\.json cannot be read"):
            read_manifest(directory)


def test_ghost_writing_after_the_fork_is_off_the_line(tmp_path: Path) -> None:
    manifests = [
        manifest("1:0"),
        manifest("1:20"),
        manifest("1:40"),
        manifest("2:40", parent="1:20"),
        manifest("3:50", parent="2:40"),
    ]
    line = line_of(3, manifests, parent=name("2:40"))
    assert [str(m.name) for m in line] == ["1:0", "1:20", "2:40", "3:50"]


def test_off_line_checkpoint_is_not_chosen(tmp_path: Path) -> None:
    put(tmp_path, "1:20")
    record_lineage(tmp_path, 2, parent=name("1:20"))
    put(tmp_path, "1:40")  # written by a ghost of generation 1 after generation 2 had resumed
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.name == name("1:20")
    put(tmp_path, "2:30", parent="1:20")
    put(tmp_path, "1:60")
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.name == name("2:30")
    assert newest_generation(tmp_path) == 2


def test_generation_without_checkpoints_goes_on_along_its_own_line_though_its_parent_is_lost(tmp_path: Path) -> None:
    """An operator rolled back to 1:40 of three checkpoints; now it is damaged, and 1:60 was never resumed from."""
    for step in (20, 40, 60):
        put(tmp_path, f"1:{step}")
    record_lineage(tmp_path, 1, parent=None)
    record_lineage(tmp_path, 2, parent=name("1:40"))
    (name("1:40").directory(tmp_path) / "manifest.json").write_bytes(b"{")
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.name == name("1:20")


def test_line_leads_through_a_generation_whose_checkpoints_are_gone(tmp_path: Path) -> None:
    put(tmp_path, "1:20")
    put(tmp_path, "1:40")
    record_lineage(tmp_path, 2, parent=name("1:20"))
    record_lineage(tmp_path, 3, parent=name("2:30"))
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.name == name("1:20")
    assert recorded_parents(tmp_path) == {2: name("1:20"), 3: name("2:30")}


def test_run_that_lost_all_of_its_line_does_not_silently_begin_anew(tmp_path: Path) -> None:
    put(tmp_path, "1:40")
    record_lineage(tmp_path, 2, parent=name("1:20"))
    with pytest.raises(CheckpointMissing, match="went on from checkpoint 1:20, and neither that nor any before it"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("change", [("20", "40"), ("}", ""), ('"step"', '"stop"')])
def test_note_of_a_generation_that_is_not_what_was_written_is_refused(tmp_path: Path, change: tuple[str, str]) -> None:
    put(tmp_path, "1:20")
    put(tmp_path, "1:40")
    record_lineage(tmp_path, 2, parent=name("1:20"))
    assert read_lineage(tmp_path, 2) == name("1:20")
    path = tmp_path / "generation-00002" / "lineage.json"
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(CheckpointDamaged, match=r"lineage\.json cannot be read .* EVERSTEP_RESUME"):
        newest_checkpoint(tmp_path)


def test_generation_that_was_killed_before_its_note_has_trained_nothing(tmp_path: Path) -> None:
    put(tmp_path, "1:20")
    (tmp_path / "generation-00002").mkdir()
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.name == name("1:20")


def test_deliberate_new_beginning_is_not_undone_by_older_checkpoints(tmp_path: Path) -> None:
    put(tmp_path, "1:20")
    record_lineage(tmp_path, 2, parent=None)
    assert newest_checkpoint(tmp_path) is None


def test_nothing_to_choose_from_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_generation(tmp_path) == 0


def test_newest_ten_and_the_parent_are_kept() -> None:
    line = [manifest(f"1:{step}") for step in range(0, 60, 20)] + [
        manifest(f"2:{step}", parent="1:40") for step in range(60, 300, 20)
    ]
    expired = choose_expired(line, generation=2, parent=name("1:40"))
    assert [str(n) for n in expired] == ["1:0", "1:20", "2:60", "2:80"]


def test_off_line_checkpoints_go_before_those_on_the_line() -> None:
    manifests = [manifest("1:20"), manifest("1:40"), manifest("2:30", parent="1:20"), manifest("2:40", parent="1:20")]
    assert choose_expired(manifests, generation=2, parent=name("1:20"), keep=3) == [name("1:40")]
    assert choose_expired(manifests, generation=2, parent=name("1:20"), keep=4) == []


def test_checkpoints_of_a_newer_generation_are_left_alone() -> None:
    """This process may itself be the ghost."""
    manifests = [manifest("1:20"), manifest("1:40"), *(manifest(f"2:{s}", parent="1:20") for s in (40, 60))]
    assert choose_expired(manifests, generation=1, parent=None, keep=1) == [name("1:20")]


def test_removal_takes_left_overs_of_killed_saves_along(tmp_path: Path) -> None:
    for step in (20, 40, 60):
        put(tmp_path, f"1:{step}")
    left_over = tmp_path / "generation-00001" / ".writing-step-00000050-77"
    newer = tmp_path / "generation-00002" / ".writing-step-00000050-78"
    nameless = tmp_path / "generation-00001" / "step-00000050"  # killed between the rename and the manifest
    left_over.mkdir()
    nameless.mkdir()
    newer.mkdir(parents=True)
    remove_expired(tmp_path, generation=1, parent=None, keep=2)
    assert [str(m.name) for m in complete_checkpoints(tmp_path)] == ["1:40", "1:60"]
    assert not name("1:20").directory(tmp_path).exists()
    assert not left_over.exists() and not nameless.exists() and newer.exists()


@pytest.mark.parametrize("text", ["", "60", "1:", "a:b", "1:2:3", "-1:5"])
def test_refuses_a_name_that_is_not_generation_and_step(text: str) -> None:
    with pytest.raises(CheckpointMissing, match="generation"):
        CheckpointName.parse(text)


def test_what_the_server_has_pinned_stays_whatever_its_age() -> None:
    manifests = [manifest(f"1:{step}") for step in range(0, 60, 10)]
    expired = choose_expired(manifests, generation=1, parent=None, keep=2, pinned={name("1:10"), name("7:70")})
    assert [str(n) for n in expired] == ["1:0", "1:20", "1:30"]


def test_removal_spares_the_last_good_copy_though_newer_ones_fill_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (20, 40, 60):
        put(tmp_path, f"1:{step}")
    (tmp_path / PINNED).write_text('{"keep": ["1:20"]}')
    monkeypatch.setenv("EVERSTEP_RUN_DIR", str(tmp_path))
    remove_expired(tmp_path, generation=1, parent=None, keep=1)
    assert [str(m.name) for m in complete_checkpoints(tmp_path)] == ["1:20", "1:60"]


@pytest.mark.parametrize("content", [None, "", "[]", '{"keep": 7}', '{"keep": [7]}', '{"keep": ["x"]}'])
def test_pins_that_cannot_be_read_pin_nothing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / PINNED).write_text(content)
    assert pinned_by_server(str(tmp_path)) == frozenset()
    assert pinned_by_server(None) == frozenset()
