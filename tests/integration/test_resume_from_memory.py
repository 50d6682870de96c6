"""Snapshots in memory: ranks and whole nodes die, and training goes on from them bit for bit. Real ranks, by fork.

A node is a directory of its own for what its ranks keep; torch is loaded here, and each rank runs on one thread.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launches import wait_until
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import everstep
from everstep.checkpoint import memory_tier
from everstep.checkpoint.manifest import CheckpointName, complete_checkpoints
from everstep.checkpoint.memory import held_in

STEPS = 24
SAVE_EVERY = 16
"""So rarely that what is lost shows where a run has gone on from."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in [name for name in os.environ if name.startswith("EVERSTEP_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(variable, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(*, sharded: bool, memory_every: int | None, partner: bool, die_at: dict[int, int], root: Path) -> None:
    torch.use_deterministic_algorithms(True)
    run = everstep.Run(
        total_steps=STEPS,
        save_every=SAVE_EVERY,
        seed=5,
        checkpoint_directory=root / "checkpoints",
        memory_every=memory_every,
        memory_partner=partner,
    )
    model: nn.Module = nn.Sequential(nn.Linear(16, 37), nn.Tanh(), nn.Dropout(0.1), nn.Linear(37, 16))
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[3]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=not sharded)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=None)
    run.resume()
    for step in run.steps():
        optimizer.zero_grad()
        batch = torch.randn(8, 16)
        loss = (model(batch) - batch.flip(1)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        run.report(loss=loss)
        if die_at and step == 1:  # while the first save is written, no snapshot is taken
            wait_until(lambda: heard_of_all(run) and complete_checkpoints(root / "checkpoints"))
        if die_at and memory_every is not None and step > 1 and step % memory_every == 1:
            wait_until(functools.partial(kept_by_all, run, root, step - 1, copies=partner))
        if die_at.get(run.rank) == step:
            os.kill(os.getpid(), signal.SIGKILL)


def heard_of_all(run: everstep.Run) -> bool:
    """Whether this rank knows that nothing it has handed over is under way: the next snapshot waits for nothing."""
    assert run._saver is not None
    run._hear_of_saves()  # as between steps
    return not (run._saver.busy or run._saver._memory_busy)


def kept_by_all(run: everstep.Run, root: Path, step: int, *, copies: bool) -> bool:
    """Whether the snapshot of this step is whole, which takes others a moment longer than training."""
    if not heard_of_all(run):  # a copy is exchanged once the rank has heard that its part is there
        return False
    held = {
        (held.rank, held.copied)
        for memory in root.glob("memory-*")
        for held in held_in(memory)
        if held.name.step == step
    }
    return held >= {(rank, copied) for rank in range(dist.get_world_size()) for copied in {False, copies}}


def in_ranks(
    root: Path,
    log: str,
    *,
    nodes: tuple[int, ...] = (0, 0),
    sharded: bool = False,
    memory_every: int | None = 4,
    partner: bool = False,
    die_at: dict[int, int] | None = None,
    plan: dict[str, str] | None = None,
    limit_s: float = 120.0,
) -> list[int]:
    """Exit codes of ranks that trained; rank r keeps its snapshots in node `nodes[r]`. All die with the first killed.

    plan: what a runner says of the generation, as environment; None for ranks that are alone.
    """
    store = root / f"store-{uuid.uuid4()}"
    pids = {}
    for rank, node in enumerate(nodes):
        if pid := os.fork():
            pids[pid] = rank
            continue
        code = 1
        try:
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(len(nodes)),
                EVERSTEP_LOG_DIR=str(root / log),
                EVERSTEP_MEMORY_DIR=str(root / f"memory-{node}"),
                **(plan or {}),
            )
            dist.init_process_group(
                "gloo", store=dist.FileStore(str(store), len(nodes)), rank=rank, world_size=len(nodes)
            )
            train(sharded=sharded, memory_every=memory_every, partner=partner, die_at=die_at or {}, root=root)
            code = 0
        except BaseException as err:
            (root / f"{log}-error-{rank}").write_text(f"{type(err).__name__}: {err}")
        finally:
            os._exit(code)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + limit_s
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pids.pop(pid)] = code = os.waitstatus_to_exitcode(status)
            if code:  # one that ends by itself leaves its peers the time to do so, too
                deadline = 0.0 if code < 0 else min(deadline, time.monotonic() + 30.0)
        if time.monotonic() > deadline:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            deadline = time.monotonic() + limit_s
        time.sleep(0.01)
    said = [path.read_text() for path in root.glob(f"{log}-error-*")]
    assert all(codes[rank] == -signal.SIGKILL for rank in die_at or {}), said
    return [codes[rank] for rank in range(len(nodes))]


def lines(root: Path, log: str, rank: int, kind: str) -> list[dict[str, Any]]:
    # What a rank was killed in the middle of writing is no line.
    found = [json.loads(line) for line in (root / log / f"rank-{rank}.jsonl").read_text().split("\n")[:-1]]
    return [line for line in found if line["kind"] == kind]


def resumed(root: Path, log: str, rank: int = 0) -> dict[str, Any]:
    return lines(root, log, rank, "resumed")[0]


def losses(root: Path, log: str, rank: int) -> dict[int, str]:
    return {line["step"]: line["loss_hex"] for line in lines(root, log, rank, "step")}


def warnings_of(root: Path, log: str) -> str:
    return " ".join(line["text"] for line in lines(root, log, 0, "warning"))


def final_state(root: Path) -> bytes:
    """Every byte of the last checkpoint's shards."""
    last = complete_checkpoints(root / "checkpoints")[-1]
    assert last.name.step == STEPS
    return b"".join(path.read_bytes() for path in sorted(last.name.directory(root / "checkpoints").glob("shard-*")))


def assert_same_as_undisturbed(root: Path, undisturbed: Path, logs: list[str], *, ranks: int = 2) -> None:
    for rank in range(ranks):
        whole = losses(undisturbed, "whole", rank)
        assert sorted(whole) == list(range(1, STEPS + 1))
        for log in logs:
            assert losses(root, log, rank).items() <= whole.items()
    assert final_state(root) == final_state(undisturbed)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Roots of runs that nobody disturbed and that kept nothing in memory, by whether they were sharded."""
    roots = {}
    for sharded in (False, True):
        root = roots[sharded] = tmp_path_factory.mktemp("undisturbed")
        assert in_ranks(root, "whole", sharded=sharded, memory_every=None) == [0, 0]
        assert not (root / "memory-0").exists() or not held_in(root / "memory-0")
    return roots


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_killed_rank_costs_no_more_steps_than_lie_between_snapshots(
    tmp_path: Path, undisturbed: dict[bool, Path], sharded: bool
) -> None:
    codes = in_ranks(tmp_path, "first", sharded=sharded, die_at={1: 14})
    assert codes[1] == -signal.SIGKILL and codes[0] != 0
    assert {held.name.step for held in held_in(tmp_path / "memory-0")} >= {12}
    assert in_ranks(tmp_path, "again", sharded=sharded) == [0, 0]
    said = [resumed(tmp_path, "again", rank) for rank in range(2)]
    assert [(line["step"], line["tier"]) for line in said] == [(12, "memory")] * 2
    assert all(line["saved_digest"] == line["live_digest"] for line in said)
    assert_same_as_undisturbed(tmp_path, undisturbed[sharded], ["first", "again"])
    assert not (tmp_path / "memory-0").exists(), "the end is on disk: nothing is left in memory"


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_lost_node_is_made_up_for_by_its_partner(tmp_path: Path, undisturbed: dict[bool, Path], sharded: bool) -> None:
    in_ranks(tmp_path, "first", nodes=(0, 1), sharded=sharded, partner=True, die_at={1: 14})
    shutil.rmtree(tmp_path / "memory-1")
    assert {(held.rank, held.copied) for held in held_in(tmp_path / "memory-0")} == {(0, False), (1, True)}
    # The new node in the place of the lost one has nothing.
    assert in_ranks(tmp_path, "again", nodes=(0, 2), sharded=sharded, partner=True) == [0, 0]
    said = [resumed(tmp_path, "again", rank) for rank in range(2)]
    assert [(line["step"], line["tier"]) for line in said] == [(12, "memory")] * 2
    assert_same_as_undisturbed(tmp_path, undisturbed[sharded], ["first", "again"])


def test_lost_node_without_partner_means_disk(tmp_path: Path, undisturbed: dict[bool, Path]) -> None:
    in_ranks(tmp_path, "first", nodes=(0, 1), die_at={1: 22})
    shutil.rmtree(tmp_path / "memory-1")
    assert in_ranks(tmp_path, "again", nodes=(0, 2)) == [0, 0]
    assert (resumed(tmp_path, "again")["step"], resumed(tmp_path, "again")["tier"]) == (SAVE_EVERY, "disk")
    assert_same_as_undisturbed(tmp_path, undisturbed[False], ["first", "again"])


def test_damaged_snapshot_is_passed_over_with_a_sentence(tmp_path: Path, undisturbed: dict[bool, Path]) -> None:
    in_ranks(tmp_path, "first", die_at={1: 22})
    newest = max(held_in(tmp_path / "memory-0"))
    assert newest.name == CheckpointName(generation=1, step=20)
    shard = newest.directory(tmp_path / "memory-0") / f"shard-{newest.rank:05d}.bin"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert in_ranks(tmp_path, "again") == [0, 0]
    assert (resumed(tmp_path, "again")["step"], resumed(tmp_path, "again")["tier"]) == (SAVE_EVERY, "disk")
    said = warnings_of(tmp_path, "again")
    assert "The snapshot 1:20 in memory cannot be used" in said and "Going on from 1:16 on disk" in said
    assert_same_as_undisturbed(tmp_path, undisturbed[False], ["first", "again"])


def test_budget_that_does_not_fit_is_refused_and_training_goes_on(
    tmp_path: Path, undisturbed: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_tier, "available_bytes", lambda: 20_000)
    assert in_ranks(tmp_path, "tight") == [0, 0]
    said = warnings_of(tmp_path, "tight")
    assert said.count("no snapshots are kept from here on") == 1
    assert "3 snapshots of 1 MiB need 1 MiB of memory, and 1 MiB are free" in said
    told = [line["reason"] for line in lines(tmp_path, "tight", 1, "not_kept") if "from here on" in line["reason"]]
    assert len(told) == 1 and not lines(tmp_path, "tight", 0, "kept")
    assert [manifest.name.step for manifest in complete_checkpoints(tmp_path / "checkpoints")] == [0, SAVE_EVERY, STEPS]
    assert_same_as_undisturbed(tmp_path, undisturbed[False], ["tight"])


def test_partner_on_the_same_node_is_refused_with_a_sentence(tmp_path: Path) -> None:
    assert in_ranks(tmp_path, "alone", partner=True) == [0, 0]
    assert "copies on a partner node were asked for, but all ranks share one node's memory" in warnings_of(
        tmp_path, "alone"
    )
    assert not lines(tmp_path, "alone", 0, "kept")


def test_plan_that_names_a_snapshot_gets_that_one_or_an_error_and_never_another_step(
    tmp_path: Path, undisturbed: dict[bool, Path]
) -> None:
    def planned(generation: int, resume: str = "") -> dict[str, str]:
        return {"EVERSTEP_GENERATION": str(generation), "EVERSTEP_RESUME": resume}

    in_ranks(tmp_path, "first", die_at={1: 22}, plan=planned(1))
    shutil.copytree(tmp_path / "memory-0", tmp_path / "lost")
    shutil.rmtree(tmp_path / "memory-0")
    assert in_ranks(tmp_path, "refused", plan=planned(2, "1:20")) == [1, 1]
    for rank in range(2):
        assert (tmp_path / f"refused-error-{rank}").read_text().startswith("CheckpointMissing: There is no complete")
    shutil.copytree(tmp_path / "lost", tmp_path / "memory-0")
    assert in_ranks(tmp_path, "again", plan=planned(3, "1:20")) == [0, 0]
    assert (resumed(tmp_path, "again")["step"], resumed(tmp_path, "again")["tier"]) == (20, "memory")
    assert_same_as_undisturbed(tmp_path, undisturbed[False], ["first", "again"])
