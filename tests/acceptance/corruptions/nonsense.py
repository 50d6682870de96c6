"""Checkpoints whose hashes are right and whose content is not: what a writer with a bug, or a forger, would leave.

Each changes what the manifest or the ranks' files say; `Case.reseal` then gives them hashes that fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from corruptions.ground import Case

Manifest = dict[str, Any]
Described = list[dict[str, Any]]


def _last_chunk(described: Described) -> dict[str, Any]:
    """One that holds bytes."""
    chunk: dict[str, Any] = [one for one in described[-1]["chunks"] if one["size_bytes"]][-1]
    return chunk


def _weight(described: Described) -> list[dict[str, Any]]:
    return [chunk for part in described for chunk in part["chunks"] if chunk["key"] == "model/0.weight"]


def _chunks(**changes: Any) -> Callable[[Manifest, Described], None]:
    def change(_: Manifest, described: Described) -> None:
        _last_chunk(described).update(changes)

    return change


def _says(**changes: Any) -> Callable[[Manifest, Described], None]:
    def change(manifest: Manifest, _: Described) -> None:
        manifest.update(changes)

    return change


def _lists(**changes: Any) -> Callable[[Manifest, Described], None]:
    def change(manifest: Manifest, _: Described) -> None:
        manifest["files"][-1].update(changes)

    return change


def _part(value: Any) -> Callable[[Manifest, Described], None]:
    def change(_: Manifest, described: Described) -> None:
        described[0]["parts"]["odds"] = value

    return change


def chunk_missing(_: Manifest, described: Described) -> None:
    """The bytes are there, under another name: that part of the tensor would be whatever memory held."""
    gone = _last_chunk(described)
    gone.update(key="filler", shape=gone["sizes"], offsets=[0] * len(gone["sizes"]))


def chunk_twice(_: Manifest, described: Described) -> None:
    """One tensor's chunk takes the place of another's of the same size."""
    chunks = [chunk for part in described for chunk in part["chunks"] if chunk["key"].endswith("0.bias")]
    other = [chunk for part in described for chunk in part["chunks"] if chunk["key"].endswith("state/1/exp_avg")]
    for one, two in zip(chunks, other, strict=True):
        two.update({field: one[field] for field in ("key", "offsets", "shape")})


def chunk_elsewhere(_: Manifest, described: Described) -> None:
    """A part lies where another one lies, and its own place stays empty."""
    chunk = _weight(described)[-1]
    sizes, shape = chunk["sizes"], chunk["shape"]
    if sizes == shape:
        chunk["shape"] = [2 * shape[0], *shape[1:]]
    else:
        chunk["offsets"] = [0] * len(shape)


def tensor_larger(_: Manifest, described: Described) -> None:
    """All say that the tensor has more rows than anybody has written."""
    for chunk in _weight(described):
        chunk["shape"] = [chunk["shape"][0] + 1, *chunk["shape"][1:]]
    for part in described:
        _grow(part["parts"])


def _grow(structure: Any) -> None:
    if isinstance(structure, dict):
        if structure.get("path") == "model/0.weight":
            structure["shape"][0] += 1
        for value in structure.values():
            _grow(value)
    elif isinstance(structure, list):
        for value in structure:
            _grow(value)


def other_type(_: Manifest, described: Described) -> None:
    for chunk in _weight(described):
        chunk["dtype"] = "int32"


def order_changed(_: Manifest, described: Described) -> None:
    """The second tensor's chunk is described as the first."""
    one, two = described[0]["chunks"][:2]
    one["at"], two["at"] = two["at"], one["at"]


def files_twice(manifest: Manifest, _: Described) -> None:
    manifest["files"].append(dict(manifest["files"][0]))


def own_key_of_nobody(_: Manifest, described: Described) -> None:
    described[-1]["own_keys"]["model/0.weight"] = "model/0.weight@nobody"


def same_as_nobody(_: Manifest, described: Described) -> None:
    described[-1]["parts"]["ghost"] = {"$": "same"}


def field_missing(_: Manifest, described: Described) -> None:
    del _last_chunk(described)["sha256"]


def deep_state(_: Manifest, described: Described) -> None:
    deep: Any = 1
    for _level in range(400):
        deep = [deep]
    described[0]["parts"]["odds"] = {"$": "tuple", "items": [deep, {"$": "unknown"}]}


def _array(**changes: Any) -> dict[str, Any]:
    return {"$": "array", "dtype": "<i2", "shape": [2], "data": "AAAAAA==", **changes}


NONSENSE: dict[str, Callable[[Manifest, Described], None]] = {
    "a chunk is missing": chunk_missing,
    "a chunk is there twice": chunk_twice,
    "a chunk lies elsewhere": chunk_elsewhere,
    "a tensor larger than its parts": tensor_larger,
    "another type": other_type,
    "another order": order_changed,
    "files listed twice": files_twice,
    "a key that nobody wrote": own_key_of_nobody,
    "the same as nobody": same_as_nobody,
    "a field missing": field_missing,
    "a deep state of unknown kind": deep_state,
    "negative sizes": _chunks(sizes=[-1, 2]),
    "sizes that are words": _chunks(sizes=["a"]),
    "no sizes": _chunks(sizes=None),
    "true for one": _chunks(sizes=[True]),
    "a chunk larger than any memory": _chunks(size_bytes=10**18),
    "a chunk of negative length": _chunks(size_bytes=-8),
    "an unknown type": _chunks(dtype="float33x"),
    "a function for a type": _chunks(dtype="save"),
    "a hash that is none": _chunks(sha256=None),
    "an unknown kind of value": _part({"$": "pickle", "data": ""}),
    "a value without a kind": _part({}),
    "a tensor without a path": _part({"$": "tensor", "dtype": "torch.float32", "shape": [1]}),
    "a tensor that nobody wrote": _part({"$": "tensor", "path": "x", "dtype": "torch.float32", "shape": [1]}),
    "an array of another length": _part(_array(shape=[3])),
    "an array of Python objects": _part(_array(dtype="|O")),
    "an array of no type": _part(_array(dtype="nonsense")),
    "an array that is no text": _part(_array(data=7)),
    "an array that does not decode": _part(_array(data="AAA")),
    "a key that is a list": _part({"$": "dict", "items": [[[1], 2]]}),
    "an item without a value": _part({"$": "dict", "items": [[1]]}),
    "a billion ranks": _says(world_size=10**9),
    "no ranks": _says(world_size=0, files=[]),
    "ranks that are a word": _says(world_size="2"),
    "a step that is a word": _says(step="8"),
    "a parent that is a word": _says(parent="1:4"),
    "files that are a word": _says(files="all"),
    "no moment": _says(created_at=math.nan),
    "the end of time": _says(created_at=math.inf),
    "a file elsewhere": _lists(name="../step-00000006/shard-00000.bin"),
    "a file of negative length": _lists(size_bytes=-1),
    "a file larger than any memory": _lists(size_bytes=1 << 62),
    "a file with a field too many": _lists(mode=7),
}


def nonsense(case: Case) -> str:
    name = case.rng.choice(list(NONSENSE))
    case.reseal(NONSENSE[name])
    case.agent_can_see = False
    return name


def deep_manifest(case: Case) -> str:
    """Deeper than a parser may go."""
    case.put(case.directory / "manifest.json", b'{"format": ' + b"[" * 200_000)
    return "200,000 brackets"
