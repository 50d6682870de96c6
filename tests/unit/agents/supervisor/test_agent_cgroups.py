"""Where cgroup v2 is mounted, on pure and on hybrid hosts."""

from __future__ import annotations

from pathlib import Path

from agents.supervisor.cgroups import ControlGroup, cgroup2_mount

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
