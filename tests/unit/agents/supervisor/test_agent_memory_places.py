"""Where ranks keep snapshots in a node's memory, and what an agent removes of it."""

from __future__ import annotations

import os
from pathlib import Path

from agents.supervisor.memory_places import MemoryPlaces


def places(tmp_path: Path, agent: str = "a") -> MemoryPlaces:
    return MemoryPlaces(tmp_path / agent, shared=tmp_path / "shm")


def test_only_what_no_job_comes_back_for_is_removed(tmp_path: Path) -> None:
    mine, uid = places(tmp_path), os.getuid()
    for job in ("job-1", "job-2"):
        (mine.place(job, uid=uid) / "generation-00001-ab").mkdir(parents=True)
    assert mine.clean({"job-2"}) == ["job-1"]
    assert not mine.place("job-1", uid=uid).exists()
    assert mine.place("job-2", uid=uid).exists()


def test_what_another_agent_of_the_machine_keeps_stays(tmp_path: Path) -> None:
    theirs = places(tmp_path, "b").place("job-1", uid=os.getuid())
    theirs.mkdir(parents=True)
    assert places(tmp_path).clean(set()) == []
    assert theirs.exists()


def test_link_in_the_place_of_a_users_directory_is_not_followed(tmp_path: Path) -> None:
    mine, uid = places(tmp_path), os.getuid()
    elsewhere = tmp_path / "elsewhere" / mine.place("job-1", uid=uid).name
    elsewhere.mkdir(parents=True)
    (tmp_path / "shm").mkdir()
    mine.place("job-1", uid=uid).parent.symlink_to(tmp_path / "elsewhere")
    assert mine.clean(set()) == []
    assert elsewhere.exists()


def test_directory_in_another_users_name_is_not_touched(tmp_path: Path) -> None:
    mine = places(tmp_path)
    (place := mine.place("job-1", uid=os.getuid() + 1)).mkdir(parents=True)
    assert mine.clean(set()) == []
    assert place.exists()


def test_nothing_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert places(tmp_path).clean(set()) == []
