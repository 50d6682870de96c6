"""Proof of stop when looking itself fails: nothing is proven by it, and nothing is given up."""

from __future__ import annotations

import os
from pathlib import Path

from agents.protocol.messages import ProofKind
from agents.supervisor.cgroups import ControlGroup
from agents.supervisor.stopping import Target, prove_stopped


async def test_look_that_fails_proves_nothing_and_is_repeated(tmp_path: Path) -> None:
    events = tmp_path / "cgroup.events"
    events.mkdir()  # reading it fails with an error of its own
    looks = 0

    def target() -> Target:
        nonlocal looks
        looks += 1
        if looks == 3:
            events.rmdir()
            events.write_text("populated 0\n")
        return Target(mark="nobody:1:plan", group=ControlGroup(tmp_path), runner=None)

    proof = await prove_stopped(target, own_children=set(), stuck=lambda _: None, unkillable=lambda _: None)
    assert (looks, proof.kind) == (3, ProofKind.CGROUP_EMPTY)


def test_kills_one_by_one_where_the_kernel_has_no_kill_file(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("")
    ControlGroup(tmp_path).kill()
    assert not (tmp_path / "cgroup.kill").exists()
    os.mknod(tmp_path / "cgroup.kill", 0o600)
    ControlGroup(tmp_path).kill()
    assert (tmp_path / "cgroup.kill").read_text() == "1"
