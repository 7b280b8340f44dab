"""The leaves of a checkpoint, listed without reading their bytes and, where possible, without torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from .._native import Entries, Index, Remote, Stored, _dtypes, _file_entry_digests
from ..errors import ProtocolError
from ..state.grammar import children
from ..storage import foreign, reserved
from ..storage.places import AnyPlace

#: torch's names of the dtypes of a container.
TORCH_NAMES = {name: torch_name for name, torch_name in _dtypes() if torch_name}
#: The deepest tree; the engine refuses what is deeper.
_DEEPEST = 256
#: Characters of all paths of a tree together. Keys far up in a hostile tree stand in the paths of all leaves below.
_LONGEST_PATHS = 1 << 28
#: Characters of a path in a note about another leaf.
_LONGEST_NOTED = 200
_BITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of a checkpoint.

    Attributes:
        path: its keys, joined with dots
        kind: ``tensor``; ``view`` for a tensor that is not all of its memory, or a DTensor; ``object`` for what is
            neither; ``sharded`` for a tensor in several shards; ``alias`` for a leaf that has stood in another place
        dtype: its dtype, by torch's name where torch has one; empty for objects
        shape: its shape
        bytes: how many bytes its elements have
        notes: what else is known of it: that it is a Parameter, with what it shares memory, which shard it is
        digest: CRC-64/NVME of its bytes, in hexadecimal digits, or for ``sharded`` a digest of its shards' digests and
            places; ``None`` if it is not known
        part: which part of a tensor it is that is spread over ranks; empty for others
    """

    path: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bytes: int = 0
    notes: list[str] = field(default_factory=list)
    digest: str | None = None
    part: str = ""

    def fields(self) -> dict[str, Any]:
        """Returns the leaf for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True)
class Listing:
    """What a checkpoint holds.

    Attributes:
        about: facts of the whole, such as its step and whether it has checksums
        leaves: its leaves, in the order of its tree
        tree: the tree as JSON has it, if it has one
        hidden: the digest of each entry that is not a leaf itself: the memory of views, the pickle of objects, and the
            manifest
    """

    about: dict[str, Any]
    leaves: list[Leaf]
    tree: Any = None
    hidden: dict[str, str] = field(default_factory=dict)


def list_file(path: AnyPlace, *, digests: bool) -> Listing:
    """Lists a container file; with ``digests``, those of its tensors, too.

    Raises:
        TensorferryError: it cannot be read, or is no container
    """
    stored = Stored.open(path, checksums=False)
    foreign.refuse_parts(path, stored)
    known = _file_entry_digests(path) if digests else None
    about: dict[str, Any] = {"kind": _kind(stored), "file_bytes": path.stat().st_size, "checksums": stored.is_verified}
    return _list_container(stored, about, lambda: known)


def list_remote(remote: Remote, step: int, *, digests: bool) -> Listing:
    """Lists what a peer serves. With ``digests`` this counts as the fetch.

    Raises:
        TensorferryError: as for ``HTTPTransport.recv_checkpoint``
    """
    about = {"kind": _kind(remote), "step": step, "checksums": True}
    return _list_container(remote, about, remote.entry_digests if digests else lambda: None)


def _kind(container: Stored | Remote) -> str:
    if container.manifest is not None:
        return "state"
    return "index" if reserved.INDEX in container.names else "tensors"


def _list_container(
    container: Stored | Remote, about: dict[str, Any], digests: Callable[[], list[int] | None]
) -> Listing:
    """Lists a container: adds to ``about`` what it says of itself, and to its leaves what ``digests`` returns."""
    manifest, text = container.manifest, container.tree
    names, plain = container.names, list(container.plain)
    about |= {"entries": len(names), "bytes": sum(container.sizes), "metadata": dict(container.about)}
    leaves = _plain(container, plain)
    tree = None
    if manifest is not None and text is not None:
        fields, tree = _parsed_json(manifest), _parsed_json(text)
        if not isinstance(fields, dict):
            raise ProtocolError("the manifest is not a JSON object")
        leaves = list(_of_state(leaves, fields, tree))
    entry_digests = digests()
    hidden: dict[str, str] = {}
    if entry_digests is not None:
        by_name = {name: f"{digest:016x}" for name, digest in zip(names, entry_digests, strict=True)}
        of_path = {names[number]: by_name[names[number]] for number in plain}
        leaves = [replace(leaf, digest=of_path.get(leaf.path)) if leaf.kind == "tensor" else leaf for leaf in leaves]
        shown = {names[number] for number in plain} | {reserved.DIGESTS}
        hidden = {name: digest for name, digest in by_name.items() if name not in shown}
    return Listing(about, leaves, tree, hidden)


def _parsed_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"the manifest cannot be read: {e}") from e


def _plain(container: Entries, plain: list[int]) -> list[Leaf]:
    names, dtypes, shapes, sizes = container.names, container.dtypes, container.shapes, container.sizes
    return [Leaf(names[i], "tensor", TORCH_NAMES.get(dtypes[i], dtypes[i]), shapes[i], sizes[i]) for i in plain]


def _of_state(plain: list[Leaf], fields: dict[str, Any], tree: Any) -> Iterator[Leaf]:
    """Yields the leaves of a state in the order of its tree."""
    flags = fields.get("flags") or ""
    described = {row[0]: row for row in fields.get("tensors") or () if isinstance(row, list) and len(row) == 4}
    shards = fields.get("shards") or {}
    paths: dict[int, str] = {}
    order = list(walk(tree))
    for path, number in order:
        paths.setdefault(number, plain[number].path if 0 <= number < len(plain) else path)
    shared = _shared(fields.get("shared") or (), paths)
    seen: set[int] = set()
    for path, number in order:
        notes = list(shared.get(number, ()))
        is_object = number < 0 and -number - 1 not in described
        # Equal numbers and texts are often one object: only a pickle would say which objects can change in both places.
        if number in seen and not is_object:
            notes.insert(0, f"the same as {_brief(paths[number])}")
            yield Leaf(path, "alias", notes=notes)
            continue
        seen.add(number)
        if number >= 0:
            if number >= len(plain):
                raise ProtocolError(f"the tree names leaf {number}, and there are {len(plain)}")
            leaf = plain[number]
            flag = int(flags[number]) if number < len(flags) and flags[number] in "0123" else 0
            notes += ["parameter"] if flag & 1 else []
            notes += ["requires grad"] if flag & 2 else []
            yield Leaf(leaf.path, "tensor", leaf.dtype, leaf.shape, leaf.bytes, notes)
            continue
        if is_object:
            yield Leaf(path, "object", notes=notes)
            continue
        row = described[-number - 1]
        dtype, shape = str(row[2]).removeprefix("torch."), _shape(row[3])
        part = ""
        if isinstance(shard := shards.get(path), dict):
            those = [one for one in shard.get("parts", [shard]) if isinstance(one, dict) and "shape" in one]
            part = (
                ", ".join(f"this rank has {one['shape']} at {one.get('offsets')}" for one in those) or "no part of it"
            )
            notes.append(part)
        yield Leaf(path, "view", dtype, shape, nbytes(dtype, shape), notes, part=part)


def _shape(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
        raise ProtocolError("the manifest describes a tensor without a shape")
    return tuple(sizes)


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns how many bytes the elements of a tensor have, by the name of its dtype."""
    bits = _BITS.search(dtype)
    size = 1 if bits is None else max(int(bits[1]) // 8, 1)
    return math.prod(shape) * size


def _shared(groups: Any, paths: dict[int, str]) -> dict[int, list[str]]:
    """Returns for each leaf that shares memory a note that names the others."""
    notes: dict[int, list[str]] = {}
    for group in groups:
        numbers = [row[0] for row in group if isinstance(row, list) and row and type(row[0]) is int]
        for number in numbers:
            others = [other for other in numbers if other != number]
            if others:
                more = f" and {len(others) - 1} more" if len(others) > 1 else ""
                notes[number] = [f"shares memory with {_brief(paths.get(others[0], '?'))}{more}"]
    return notes


def _brief(path: str) -> str:
    return path if len(path) <= _LONGEST_NOTED else f"{path[:_LONGEST_NOTED]}..."


def walk(tree: Any) -> Iterator[tuple[str, int]]:
    """Yields path and number of each leaf of a tree, in its order.

    Raises:
        ProtocolError: it is not a tree, or is too deep, or its paths are too long
    """
    left = _LONGEST_PATHS
    for path, number in _below(tree, "", 0):
        left -= len(path)
        if left < 0:
            raise ProtocolError(f"the paths of the tree's leaves have more than {_LONGEST_PATHS} characters")
        yield path, number


def _below(node: Any, path: str, depth: int) -> Iterator[tuple[str, int]]:
    """Yields path and number of each leaf below a node, whose own path and depth these are."""
    if depth > _DEEPEST:
        raise ProtocolError("the tree is too deep")
    if type(node) is int:
        yield path or "root", node
        return
    prefix = f"{path}." if path else ""
    for step, key, child in children(node):
        match key:
            case _ if step == "same":
                where = path
            case ["r", int(number)]:
                where = f"{prefix}<object {number}>"
            case _:
                where = f"{prefix}{key}"
        yield from _below(child, where, depth + 1)


class UniqueNames:
    """Gives each of several leaves with one path its own name, with ``~2`` and so on at the end: keys may have dots.

    Args:
        taken: the names that were given
    """

    def __init__(self, taken: Container[str]) -> None:
        self._taken = taken
        self._last: dict[str, int] = {}

    def of(self, path: str) -> str:
        """Returns ``path``, or what it becomes if that is taken."""
        name = path
        while name in self._taken:
            self._last[path] = self._last.get(path, 1) + 1
            name = f"{path}~{self._last[path]}"
        return name


def by_path(leaves: Iterable[Leaf]) -> dict[str, Leaf]:
    """Returns leaves by their paths, made unique."""
    found: dict[str, Leaf] = {}
    names = UniqueNames(found)
    for leaf in leaves:
        found[names.of(leaf.path)] = leaf
    return found


def list_distributed(index: Index, files: list[str]) -> Listing:
    """Lists a distributed checkpoint by its index; ``files`` has the names of its files."""
    leaves = []
    for number, key in enumerate(index.keys):
        _, _, dtype, shape, requires_grad, _, _ = index.item(number)
        chunks = index.chunks(number)
        total = sum(chunk[4] for chunk in chunks)
        if dtype is None:
            leaves.append(Leaf(key, "object", bytes=total))
            continue
        notes = ["requires grad"] if requires_grad else []
        if len(chunks) > 1:
            notes.append(f"{len(chunks)} shards in {len({chunk[2] for chunk in chunks})} files")
        leaves.append(Leaf(key, "sharded" if len(chunks) > 1 else "tensor", dtype, shape, total, notes))
    about = {"kind": "distributed", "checksums": True, "files": files}
    return Listing({**about, "bytes": sum(leaf.bytes for leaf in leaves)}, leaves)
