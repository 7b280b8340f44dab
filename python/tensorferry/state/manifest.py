"""The manifest of a container: everything that a receiver needs besides the entries and the pickle to build a state.

docs/reference/format.md lists the fields. ``rust/wire`` checks those that lead to memory (``tree``, ``flags``,
``objects``, ``storages``) before this module sees them; this module checks the others.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from .._native import _describe_objects, _describe_shards
from ..errors import ProtocolError, UnsupportedLeaf
from ..storage.container import VERSION
from .aliases import Groups, Layout
from .local_parts import SpreadTensor, first_of_mesh, is_partial, is_spread, local_tensors, spread_tensor
from .tree import Flat

#: For each storage its size in bytes, and the entries that hold bytes of it, each with the offset of its first byte.
Storages: TypeAlias = list[tuple[int, list[tuple[int, int]]]]
#: A JSON object without its closing brace, in parts: it may have megabytes, and each copy of a text takes fresh memory.
Fields: TypeAlias = list[bytes]


def encode(
    flat: Flat,
    flags: str,
    layout: bytes,
    shared: Groups,
    names: dict[tuple[str, str], str],
    numbers: Callable[[torch.UntypedStorage], int | None],
) -> Fields:
    """Returns the manifest of a state, without the tree.

    Args:
        flat: the state
        flags: a digit for each plain leaf, see :class:`Manifest`
        layout: as JSON, size and entries of each storage to which the pickle refers
        shared: the leaves that share memory
        names: for each class and function that the pickle names, as ``(module, name)``, the first leaf that needs it
        numbers: returns the number of such a storage
    """
    needs = {f"{module}.{name}": path for (module, name), path in names.items()}
    shown = flags if flags.strip("0") else ""
    head = (
        f'{{"version":{VERSION},"flags":"{shown}","objects":{len(flat.objects)},"keys":{_json(flat.keys)},"storages":'
    )
    return [
        head.encode(),
        layout,
        b',"tensors":',
        _described(flat),
        f',"kinds":{_json(kinds)}'.encode() if (kinds := _kinds(flat)) else b"",
        f',"shared":{_json(shared)},"shards":'.encode(),
        _shards(flat, numbers),
        f',"globals":{_json(needs)}'.encode(),
    ]


#: Made once: making an encoder takes longer than encoding what a small state has to say.
_encode = json.JSONEncoder(separators=(",", ":")).encode


def _json(value: Any) -> str:
    # Most states have nothing to say in most fields.
    return _encode(value) if value else str(value)


def _described(flat: Flat) -> bytes:
    """Returns as JSON ``[object, path, dtype, shape]`` for every leaf that is a tensor with a shape, but no plain one.

    A receiver compares them with its own tensors before it fetches.
    """
    others = [_entry(flat, -n - 1) for n in flat.unread]
    return _describe_objects(flat.rows, [(entry[0], _json(entry)) for entry in others if entry is not None])


def with_devices(fields: Fields, devices: Iterable[tuple[int, torch.device]]) -> Fields:
    """Returns ``fields`` from :func:`encode` with the devices of those entries that were not in host memory.

    Args:
        fields: the manifest
        devices: entries with their devices, in ascending order
    """
    found: dict[torch.device, list[list[int]]] = {}
    for entry, device in devices:
        ranges = found.setdefault(device, [])
        if ranges and ranges[-1][1] == entry - 1:
            ranges[-1][1] = entry
        else:
            ranges.append([entry, entry])
    if not found:
        return fields
    text = _json({str(device): ranges for device, ranges in found.items()})
    return [*fields, f',"devices":{text}'.encode()]


def with_tree(fields: Fields, tree: str) -> bytes:
    """Returns the complete manifest: ``fields`` from :func:`encode` with the tree, which is JSON already, inserted.

    There are spaces behind it, up to a multiple of 64 bytes.
    """
    parts = [*fields, b',"tree":', tree.encode(), b"}"]
    return b"".join([*parts, b" " * (-sum(map(len, parts)) % 64)])


def _entry(flat: Flat, number: int) -> list[Any] | None:
    found = dtype_and_shape(flat.objects[number])
    return None if found is None else [number, flat.object_paths[number], *found]


def dtype_and_shape(value: torch.Tensor) -> tuple[str, list[int]] | None:
    """Returns the dtype and the shape of a tensor; ``None`` if it has no shape."""
    try:
        return str(value.dtype), [int(dim) for dim in value.shape]
    except Exception:  # Nested tensors and uninitialised parameters have no shape, and raise various errors.
        return None


def _kinds(flat: Flat) -> dict[str, str]:
    """Returns by object the kinds of the tensors that are not simply strided."""
    if not flat.objects:
        return {}
    numbers = {-n - 1 for n in flat.unread}
    if any(is_partial(value) for _, value in flat.rows.first_specs):
        numbers |= {n for n, value in enumerate(flat.objects) if isinstance(value, torch.Tensor)}
    kinds = {str(n): kind_of(flat.objects[n]) for n in sorted(numbers)}
    return {number: kind for number, kind in kinds.items() if kind != "strided"}


def kind_of(value: torch.Tensor) -> str:
    """Returns what there is to a tensor besides dtype and shape: values can be copied if it is equal for both."""
    try:
        local = getattr(value, "_local_tensor", None)
        found = []
        for one in (value,) if local is None else (value, local):
            if one.is_meta:
                found.append("on the meta device")
            if one.is_nested:
                found.append("nested")
            if one.is_quantized:
                found.append("quantised")
            found.append("strided" if one.layout is torch.strided else str(one.layout).removeprefix("torch."))
        if local is not None and is_partial(value):
            found.append("summands of partial sums")
        return ", ".join(dict.fromkeys(found)) if len(found) > 1 else found[0]
    except Exception:  # As in dtype_and_shape.
        return f"a {type(value).__name__} of unknown layout"


def _shards(flat: Flat, numbers: Callable[[torch.UntypedStorage], int | None]) -> bytes:
    """Returns as JSON, by path, where the parts of each tensor that is spread over ranks lie in the whole one.

    A job with other placements can read slices with this.
    """
    others: dict[str, dict[str, Any]] = {}
    # Many DTensors share a spec.
    text, left = _describe_shards(flat.rows, [_beginning(value) for _, value in flat.rows.first_specs])
    for number in [*left, *flat.unread]:
        value = flat.leaf(number)
        if is_spread(value) and (fields := _shard(value, numbers)) is not None:
            others[flat.object_paths[-number - 1]] = fields
    members = [text] if text else []
    members += [_json(others)[1:-1].encode()] if others else []
    return b"".join([b"{", b",".join(members), b"}"])


def _beginning(value: Any) -> tuple[list[int], str] | None:
    """Returns the shape of a DTensor's only part, and how its description begins; ``None`` if that is not all of it."""
    try:
        spread = spread_tensor(value)
    except UnsupportedLeaf:
        return None
    if spread is None or len(spread.parts) != 1:
        return None
    offsets, sizes = map(list, spread.parts[0].box)
    return sizes, f'{_json({**_whole(value, spread), "offsets": offsets})[:-1]},"shape":'


def _whole(value: Any, spread: SpreadTensor) -> dict[str, Any]:
    mesh = first_of_mesh(value)
    about = {"dtype": str(spread.dtype), "global_shape": spread.shape}
    return about if mesh is None else {**about, "mesh": mesh}


def _shard(value: Any, numbers: Callable[[torch.UntypedStorage], int | None]) -> dict[str, Any] | None:
    """Returns the description of a tensor that is spread over ranks; ``None`` if the parts are not strided tensors."""
    try:
        spread = spread_tensor(value)
    except UnsupportedLeaf as e:
        about = dtype_and_shape(value)
        if about is None:
            return None
        local = [{"offsets": None, "shape": list(one.shape)} for one in local_tensors(value)]
        return {"dtype": about[0], "global_shape": about[1], "refused": str(e), "parts": local}
    if spread is None or any(part.tensor.layout is not torch.strided for part in spread.parts):
        return None
    parts = [
        {
            "offsets": list(box.offsets),
            "shape": list(box.sizes),
            "stride": list(local.stride()),
            "storage": numbers(local.untyped_storage()),
            "storage_offset": local.storage_offset(),
        }
        for box, local in spread.parts
    ]
    whole = _whole(value, spread)
    return {**whole, **(parts[0] if len(parts) == 1 and "mesh" in whole else {"parts": parts})}


class Manifest:
    """A decoded manifest that ``rust/wire`` has checked, or one from :func:`with_tree`.

    Args:
        fields: the JSON text; a tree in it is ignored
        tree: the tree as JSON text

    Attributes:
        tree: the tree as JSON text
        flags: empty if all plain leaves are tensors without a gradient; otherwise a digit for each plain leaf: 1 for a
            Parameter, plus 2 if it requires a gradient
        objects: the number of objects in the pickle
        storages: size and entries of each storage to which the pickle refers
        needs: for each class and function that the pickle names, the first leaf that needs it; unchecked, for messages
            only
    """

    def __init__(self, fields: str | bytes, tree: str) -> None:
        self._fields: dict[str, Any] = json.loads(fields)
        self.tree = tree
        self.flags: str = self._fields["flags"]
        self.objects: int = self._fields["objects"]
        self.storages: Storages = self._fields["storages"]
        needs = self._fields.get("globals")
        self.needs: dict[str, Any] = needs if isinstance(needs, dict) else {}
        self._devices: tuple[list[int], list[int], list[str]] | None = None

    def location(self, entry: int) -> str:
        """Returns the device on which an entry was, by the name that ``torch.load`` gives it.

        Raises:
            ProtocolError: the devices in the manifest are not described as they should be
        """
        if self._devices is None:
            self._devices = _devices(self._fields.get("devices"))
        starts, ends, names = self._devices
        at = bisect_right(starts, entry) - 1
        return names[at] if at >= 0 and entry <= ends[at] else "cpu"

    def described(self) -> tuple[dict[str, str], list[tuple[int, str, str, list[int]]]]:
        """Returns the texts of keys that are objects, and number, path, dtype and shape of each tensor in the pickle.

        Raises:
            ProtocolError: these fields are missing or malformed
        """
        keys, tensors = self._fields.get("keys"), self._fields.get("tensors")
        if not isinstance(keys, dict) or not all(isinstance(text, str) for text in keys.values()):
            raise ProtocolError("the source's manifest lacks the texts of its keys")
        found = []
        for row in tensors if isinstance(tensors, list) else [None]:
            match row:
                case [int(number), str(path), str(dtype), list(shape)]:
                    found.append((number, path, dtype, shape))
                case _:
                    raise ProtocolError("the source's manifest lacks a valid description of its tensors")
        return keys, found

    def kinds(self) -> dict[int, str]:
        """Returns by object the kinds of the tensors that are not simply strided.

        Raises:
            ProtocolError: the field is malformed
        """
        kinds = self._fields.get("kinds", {})
        try:
            return {int(number): str(kind) for number, kind in kinds.items()}
        except (AttributeError, ValueError) as e:
            raise ProtocolError(f"the source's manifest lacks a valid list of the kinds of its tensors: {e}") from e

    def parts(self, path: str) -> list[Any] | None:
        """Returns where the parts of a tensor begin in the whole one, and their shapes; ``None`` if it is not spread.

        They are unchecked, and only for comparison; parts without elements are left out.
        """
        shards = self._fields.get("shards")
        shard = shards.get(path) if isinstance(shards, dict) else None
        if not isinstance(shard, dict):
            return None
        listed = shard.get("parts", [shard])
        found = [[one.get("offsets"), one.get("shape")] for one in listed if isinstance(one, dict)]
        return [one for one in found if isinstance(one[1], list) and 0 not in one[1]]

    def shared(self) -> Groups:
        """Returns the groups of leaves that share memory at the source.

        Raises:
            ProtocolError: the field is malformed
        """
        groups = []
        try:
            for rows in self._fields.get("shared", []):
                layouts = [Layout(leaf, offset, tuple(strides), bits) for leaf, offset, strides, bits in rows]
                numbers = [n for row in layouts for n in (row.leaf, row.offset, row.bits, *row.strides)]
                if not all(type(n) is int for n in numbers):
                    raise TypeError("an item is not a number")
                groups.append(layouts)
        except (TypeError, ValueError) as e:
            raise ProtocolError(
                f"the source's manifest lacks a valid list of the tensors that share memory: {e}"
            ) from e
        return groups


def _devices(described: Any) -> tuple[list[int], list[int], list[str]]:
    """Returns the first and last entries of the ranges on devices, in ascending order, and the names of the devices."""
    ranges: list[tuple[int, int, str]] = []
    try:
        for name, of_device in (described or {}).items():
            for first, last in of_device:
                if type(first) is not int or type(last) is not int:
                    raise TypeError("an entry is not a number")
                ranges.append((first, last, name))
    except (AttributeError, TypeError, ValueError) as e:
        raise ProtocolError(f"the manifest lacks a valid list of the devices of its entries: {e}") from e
    ranges.sort()
    return [r[0] for r in ranges], [r[1] for r in ranges], [r[2] for r in ranges]
