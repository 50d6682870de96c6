"""How a checkpoint at rest goes bad: by its storage, by people, by saves that were cut off or got mixed up."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from corruptions.ground import BESIDE, GHOST, LINE, NEWEST, OLDER, PARENT, Case
from everstep.checkpoint.manifest import CheckpointName, rank_file, shard_file

# --- Bytes ----------------------------------------------------------------------------------------------------------


def flip_in_shard(case: Case) -> str:
    return _flip(case, case.rng.choice(case.shards()))


def flip_in_rank_file(case: Case) -> str:
    return _flip(case, case.rng.choice(case.rank_files()))


def flip_in_manifest(case: Case) -> str:
    return _flip(case, case.directory / "manifest.json")


def zeroed_block(case: Case) -> str:
    """A block that never reached the disk."""
    path = case.rng.choice([*case.shards(), *case.rank_files()])
    at, length = case.rng.randrange(path.stat().st_size), case.rng.choice([16, 512, 4096])

    def zero(content: bytearray) -> None:
        part = content[at : at + length]
        content[at : at + len(part)] = bytes(len(part)) if any(part) else b"\xff" * len(part)

    case.change(path, zero)
    return f"{length} bytes of {path.name} at {at}"


def truncated(case: Case) -> str:
    path = case.any_file()
    length = case.rng.choice([0, path.stat().st_size - 1, case.rng.randrange(path.stat().st_size)])
    case.put(path, path.read_bytes()[:length])
    return f"{path.name} to {length} bytes"


def half_written_manifest(case: Case) -> str:
    path = case.directory / "manifest.json"
    content = path.read_bytes()
    length = case.rng.randrange(1, len(content))
    if case.rng.random() < 0.3:
        path.unlink()
        path = path.with_name("manifest.json.tmp")  # killed before the rename
    case.put(path, content[:length])
    return f"{length} bytes of {path.name}"


def extended(case: Case) -> str:
    path = case.any_file()
    more = case.rng.choice([b"\0", b" ", case.rng.randbytes(4096), path.read_bytes()])
    case.put(path, path.read_bytes() + more)
    return f"{path.name} by {len(more)} bytes"


# --- Whole files ----------------------------------------------------------------------------------------------------


def deleted_file(case: Case) -> str:
    path = case.rng.choice([*case.shards(), *case.rank_files()])
    path.unlink()
    return path.name


def shard_of_another_rank(case: Case) -> str:
    """Of the same size, where there are such."""
    path = case.rng.choice(case.shards())
    others = [other for other in case.shards() if other != path]
    if not others:
        return shard_of_another_step(case)
    size_bytes = path.stat().st_size
    other = min(others, key=lambda other: abs(other.stat().st_size - size_bytes))
    content = other.read_bytes()[:size_bytes]
    case.put(path, content + path.read_bytes()[len(content) :])
    return f"{path.name} is {other.name}"


def shard_of_another_step(case: Case) -> str:
    return _take_over(case, BESIDE, [shard_file(case.rng.randrange(case.world_size))])


def shard_of_another_generation(case: Case) -> str:
    case.target = BESIDE
    return _take_over(case, GHOST, [shard_file(case.rng.randrange(case.world_size))])


def rank_file_of_another(case: Case) -> str:
    rank = case.rng.randrange(case.world_size)
    if case.world_size > 1 and case.rng.random() < 0.5:
        other = (rank + 1) % case.world_size
        case.take_over(case.directory / rank_file(rank), case.directory / rank_file(other))
        return f"rank {rank} has that of rank {other}"
    return _take_over(case, case.rng.choice([BESIDE, PARENT, GHOST]), [rank_file(rank)])


def one_rank_of_another_step(case: Case) -> str:
    rank = case.rng.randrange(case.world_size)
    return _take_over(case, case.rng.choice([BESIDE, PARENT]), [rank_file(rank), shard_file(rank)])


def all_ranks_of_another_step(case: Case) -> str:
    """The manifest alone is from here."""
    names = [name(rank) for rank in range(case.world_size) for name in (rank_file, shard_file)]
    return _take_over(case, case.rng.choice([BESIDE, PARENT]), names)


def manifest_of_another_step(case: Case) -> str:
    return _take_over(case, case.rng.choice([BESIDE, PARENT, GHOST]), ["manifest.json"])


def no_plain_file(case: Case) -> str:
    path, kind = case.any_file(), case.rng.choice(["directory", "pipe", "loop", "dangling link", "endless device"])
    path.unlink()
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path)
        case "dangling link":
            path.symlink_to("gone")
        case _:
            path.symlink_to("/dev/zero")
    return f"{path.name} is a {kind}"


def no_permission(case: Case) -> str:
    path = case.any_file()
    case.put(path, path.read_bytes())
    path.chmod(0)
    case.as_nobody, case.agent_can_see = True, False
    return path.name


def read_error(case: Case) -> str:
    path = case.any_file()
    case.unreadable = f"{case.directory.parent.name}/{case.directory.name}/{path.name}"
    case.agent_can_see = False
    return path.name


# --- Directories and lines ------------------------------------------------------------------------------------------


def renamed_directory(case: Case) -> str:
    """A step's directory claims another step, or another generation: the newest one, in the worst case."""
    held, claimed = case.rng.choice(
        [
            (PARENT, NEWEST),
            (BESIDE, NEWEST),
            (GHOST, BESIDE),
            (PARENT, CheckpointName(generation=2, step=10)),
            (NEWEST, CheckpointName(generation=2, step=20)),
            (GHOST, CheckpointName(generation=3, step=6)),
        ]
    )
    source, target = held.directory(case.root), claimed.directory(case.root)
    target.parent.mkdir(exist_ok=True)
    how = case.rng.choice(["moved", "copied", "linked"])
    if how == "linked":
        shutil.rmtree(target, ignore_errors=True)
        target.symlink_to(os.path.relpath(source, target.parent))
    else:
        case.copy_directory(source, target)
    if how == "moved":
        shutil.rmtree(source)
    case.target = claimed
    return f"{held} {how} to {claimed}"


def off_the_line(case: Case) -> str:
    """Nothing is left of the newest generation but the note of what it resumed from: a ghost wrote on meanwhile."""
    lost = [NEWEST, BESIDE]
    if case.rng.random() < 0.5:
        lost.append(PARENT)
    for name in lost:
        if case.rng.random() < 0.5:
            (name.directory(case.root) / "manifest.json").unlink()
        else:
            shutil.rmtree(name.directory(case.root))
    case.expected = OLDER if PARENT in lost else PARENT
    return f"lost: {', '.join(map(str, lost))}"


def lineage_note_damaged(case: Case) -> str:
    """It may say another parent then."""
    for name in (NEWEST, BESIDE):
        shutil.rmtree(name.directory(case.root))
    path = case.root / "generation-00002" / "lineage.json"
    content = path.read_bytes()
    parent = content.index(b'"step": 4') + len(b'"step": ')
    case.put(path, case.rng.choice([content[:-9], b"", content[:parent] + b"6" + content[parent + 1 :]]))
    case.expected = None
    return f"{path.stat().st_size} bytes"


# --- What must be accepted ------------------------------------------------------------------------------------------


def untouched(case: Case) -> str:
    case.target = case.rng.choice(LINE)
    return str(case.target)


def times_changed(case: Case) -> str:
    for path in case.directory.iterdir():
        case.take_over(path, path)
        os.utime(path, (0, case.rng.randrange(1 << 31)))
    return "all files"


def unrelated_file(case: Case) -> str:
    (case.directory / ".nfs0001").write_bytes(b"x")
    (case.root / "README").write_text("ours")
    (case.root / "generation-notes").mkdir()
    (case.directory.parent / "step-notes").mkdir()
    return "beside and inside"


def left_over_of_a_killed_save(case: Case) -> str:
    left = case.directory.with_name(".writing-step-00000010-0a1b2c3d")
    case.copy_directory(case.directory, left)
    (left / "manifest.json").unlink()
    nameless = CheckpointName(generation=2, step=12).directory(case.root)
    case.copy_directory(left, nameless)
    return f"{left.name} and {nameless.name} without a manifest"


def another_damaged_beside(case: Case) -> str:
    other = case.rng.choice([OLDER, PARENT, BESIDE, GHOST])
    for path in list(other.directory(case.root).iterdir()):
        if path.stat().st_size and case.rng.random() < 0.7:
            case.put(path, case.rng.randbytes(path.stat().st_size))
    return str(other)


def store_moved(case: Case) -> str:
    moved = case.root.with_name(case.root.name + "-moved")
    case.root.rename(moved)
    if case.rng.random() < 0.5:
        case.root.symlink_to(moved)
        return "and a link in its place"
    case.root = moved
    return "to another place"


def _flip(case: Case, path: Path) -> str:
    at, bit = case.rng.randrange(path.stat().st_size), case.rng.randrange(8)

    def flip(content: bytearray) -> None:
        content[at] ^= 1 << bit

    case.change(path, flip)
    return f"bit {bit} of byte {at} of {path.name}"


def _take_over(case: Case, other: CheckpointName, names: list[str]) -> str:
    for name in names:
        case.take_over(case.directory / name, other.directory(case.root) / name)
    return f"{', '.join(names)} of {other}"
