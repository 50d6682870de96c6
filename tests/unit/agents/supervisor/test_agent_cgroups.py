"""Where cgroup v2 is mounted, on pure and on hybrid hosts; which groups are there and which are left over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agents.supervisor.cgroups import ControlGroup, NodeGroups, cgroup2_mount

NOW = 1_900_000_000.0

PURE = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


def test_finds_the_mount_wherever_it_is() -> None:
    assert cgroup2_mount(PURE) == Path("/sys/fs/cgroup")
    assert cgroup2_mount(HYBRID) == Path("/sys/fs/cgroup/unified")
    assert cgroup2_mount(HYBRID.replace("cgroup2 cgroup2", "cgroup cgroup")) is None
    assert cgroup2_mount("") is None


def test_a_group_that_is_not_there_is_empty(tmp_path: Path) -> None:
    group = ControlGroup(tmp_path / "none")
    assert not group.populated
    assert group.processes() == set()
    group.remove()


def test_a_group_is_populated_as_long_as_the_kernel_says_so(tmp_path: Path) -> None:
    group = ControlGroup(tmp_path)
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    assert group.populated
    (tmp_path / "cgroup.events").write_text("populated 0\nfrozen 0\n")
    assert not group.populated


def made(place: Path, *parts: str, age_s: float = 7200.0) -> Path:
    """A group with what is below it, all last touched so long before NOW."""
    path = place.joinpath(*parts)
    path.mkdir(parents=True)
    for one in (path, *path.parents):
        if place in one.parents:
            os.utime(one, (NOW - age_s, NOW - age_s))
    return path


def agent_at(place: Path, name: str = "everstep-gpu-01-0000000a") -> NodeGroups:
    groups = NodeGroups(place / name)
    groups.hold()
    return groups


def test_group_of_an_agent_that_was_killed_and_never_started_again_is_removed_with_what_is_in_it(
    tmp_path: Path,
) -> None:
    made(tmp_path, "everstep-gpu-02-0000000b", "job_a-1", "inner")
    made(tmp_path, "everstep-gpu-02-keeper-0000000b", "drl_a-1")
    assert agent_at(tmp_path).remove_left_over(now=NOW) == 2
    assert [one.name for one in tmp_path.iterdir()] == ["everstep-gpu-01-0000000a"]


def test_group_of_an_agent_that_lives_stays_however_old_and_empty_and_so_do_its_keepers(tmp_path: Path) -> None:
    other = agent_at(tmp_path, "everstep-gpu-02-0000000b")
    made(tmp_path, "everstep-gpu-02-keeper-0000000b")
    os.utime(tmp_path / "everstep-gpu-02-0000000b", (NOW - 7200, NOW - 7200))
    mine = agent_at(tmp_path)
    os.utime(tmp_path / "everstep-gpu-01-0000000a", (NOW - 7200, NOW - 7200))
    assert mine.remove_left_over(now=NOW) == 0
    other.leave()
    made(tmp_path, "everstep-gpu-02-0000000b")
    assert mine.remove_left_over(now=NOW) == 2


@pytest.mark.parametrize(
    "name", ["everstep-gpu-02", "everstep-0000000b", "everstep-gpu-02-0000000B", "everstep-gpu-02-0000000b.scope", "x"]
)
def test_group_whose_name_is_not_an_agents_stays(tmp_path: Path, name: str) -> None:
    made(tmp_path, name)
    assert agent_at(tmp_path).remove_left_over(now=NOW) == 0
    assert (tmp_path / name).is_dir()


def test_group_that_is_young_itself_or_holds_a_young_one_stays(tmp_path: Path) -> None:
    made(tmp_path, "everstep-gpu-02-0000000b", age_s=3599)
    made(tmp_path, "everstep-gpu-03-0000000c", "job_a-1", age_s=3599)
    os.utime(tmp_path / "everstep-gpu-03-0000000c", (NOW - 7200, NOW - 7200))
    assert agent_at(tmp_path).remove_left_over(now=NOW) == 0


def test_group_that_holds_processes_stays_with_all_that_is_in_it(tmp_path: Path) -> None:
    group = made(tmp_path, "everstep-gpu-02-0000000b", "job_a-1").parent
    (group / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    os.utime(group, (NOW - 7200, NOW - 7200))
    assert agent_at(tmp_path).remove_left_over(now=NOW) == 0
    assert (group / "job_a-1").is_dir()


def test_group_that_cannot_be_removed_hinders_nothing(tmp_path: Path) -> None:
    group = made(tmp_path, "everstep-gpu-02-0000000b")
    (group / "file").touch()
    os.utime(group, (NOW - 7200, NOW - 7200))
    made(tmp_path, "everstep-gpu-03-0000000c")
    assert agent_at(tmp_path).remove_left_over(now=NOW) == 1


def test_directory_that_was_removed_is_made_again_for_the_next_group(tmp_path: Path) -> None:
    groups = agent_at(tmp_path)
    (tmp_path / "everstep-gpu-01-0000000a").rmdir()
    groups.group("job_a", 1).create()
    assert (tmp_path / "everstep-gpu-01-0000000a" / "job_a-1").is_dir()


def test_directory_that_another_agent_just_looks_at_is_held_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one holds it for a moment, finds it left over and removes it."""
    import fcntl

    root = made(tmp_path, "everstep-gpu-02-0000000b")
    looks = os.open(root, os.O_RDONLY)
    fcntl.flock(looks, fcntl.LOCK_EX)

    def end(_: float) -> None:
        root.rmdir()
        os.close(looks)

    monkeypatch.setattr("agents.supervisor.cgroups.time.sleep", end)
    agent_at(tmp_path, root.name)
    os.utime(root, (NOW - 7200, NOW - 7200))
    assert agent_at(tmp_path).remove_left_over(now=NOW) == 0
