"""The manifest of a container: everything a receiver has to know of a state besides its entries and its pickle.

docs/format.md has the fields. ``rust/wire`` checks those that lead to memory (``tree``, ``flags``, ``objects``,
``storages``) before this module sees them; the others are checked here.
"""

from __future__ import annotations

import json
import sys
from typing import Any, TypeAlias

import torch

from ..errors import ProtocolError
from ..memory.tensors import storage_key
from ..storage.container import VERSION
from .aliases import Groups, Layout
from .pickling import Storage
from .tree import Flat

#: Of each storage its size, and the entries that hold bytes of it, with the place of their first byte in it.
Storages: TypeAlias = list[tuple[int, list[tuple[int, int]]]]


def encode(
    flat: Flat,
    flags: str,
    storages: list[Storage],
    layout: Storages,
    shared: Groups,
    names: dict[tuple[str, str], str],
) -> str:
    """The manifest of a state as JSON, but for the tree.

    Args:
        flat: the state
        flags: a digit for each plain leaf, as :class:`Manifest` has it
        storages: those that the pickle refers to
        layout: the entries that hold their bytes
        shared: the leaves that share memory
        names: module and name of each class and function the pickle names, and the first leaf that needs it
    """
    fields = {
        "version": VERSION,
        "flags": flags if flags.strip("0") else "",
        "objects": len(flat.objects),
        "keys": flat.keys,
        "storages": layout,
        "tensors": describe(flat),
        "shared": shared,
        "shards": _shards(flat, storages),
        "globals": {f"{module}.{name}": path for (module, name), path in names.items()},
    }
    return json.dumps(fields, separators=(",", ":"))


def with_tree(fields: str, tree: str) -> bytes:
    """The manifest as it travels: ``fields`` from :func:`encode`, and the tree, which is JSON already and long."""
    return f'{fields[:-1]},"tree":{tree}}}'.encode()


def describe(flat: Flat) -> list[list[Any]]:
    """``[object, path, dtype, shape]`` of every leaf that is a tensor but no plain one.

    By these a receiver compares before it fetches.
    """
    described = []
    for number, (value, path) in enumerate(zip(flat.objects, flat.object_paths, strict=True)):
        if isinstance(value, torch.Tensor):
            said = dtype_and_shape(value)
            if said is not None:
                described.append([number, path, *said])
    return described


def dtype_and_shape(value: torch.Tensor) -> tuple[str, list[int]] | None:
    """Dtype and shape, if there are any."""
    try:
        return str(value.dtype), [int(dim) for dim in value.shape]
    except Exception:  # Nested tensors and uninitialised parameters have no shape, and say so in many ways.
        return None


def _shards(flat: Flat, storages: list[Storage]) -> dict[str, dict[str, Any]]:
    """Where each DTensor's local part lies in the whole: a job with other placements can read slices by this."""
    if "torch.distributed.tensor" not in sys.modules:
        return {}
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    numbers = {storage_key(s.storage): n for n, s in enumerate(storages)}
    shards = {}
    for value, path in zip(flat.objects, flat.object_paths, strict=True):
        if isinstance(value, DTensor):
            local = value._local_tensor
            _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            shards[path] = {
                "dtype": str(value.dtype),
                "global_shape": list(value.shape),
                "offsets": list(offsets),
                "shape": list(local.shape),
                "stride": list(local.stride()),
                "storage": numbers.get(storage_key(local.untyped_storage())),
                "storage_offset": local.storage_offset(),
            }
    return shards


class Manifest:
    """A manifest that came.

    Args:
        fields: the JSON, of which the tree is not read
        tree: the tree as JSON

    Attributes:
        tree: the same
        flags: a digit for each plain leaf, or nothing: 1 for a Parameter, plus 2 if it requires a gradient
        objects: how many objects the pickle has
        storages: size and entries of each storage that the pickle refers to
        needs: for each class and function the pickle names the first leaf that needs it; for messages only
    """

    def __init__(self, fields: str | bytes, tree: str) -> None:
        """Reads what ``rust/wire`` has checked, or what :func:`encode` has made."""
        self._fields: dict[str, Any] = json.loads(fields)
        self.tree = tree
        self.flags: str = self._fields["flags"]
        self.objects: int = self._fields["objects"]
        self.storages: Storages = self._fields["storages"]
        needs = self._fields.get("globals")
        self.needs: dict[str, Any] = needs if isinstance(needs, dict) else {}

    def described(self) -> tuple[dict[str, str], list[tuple[int, str, str, list[int]]]]:
        """The texts of keys that are objects, and the tensors among the objects: number, path, dtype and shape of each.

        Raises:
            ProtocolError: they are not there, or are something else
        """
        keys, tensors = self._fields.get("keys"), self._fields.get("tensors")
        if not isinstance(keys, dict) or not all(isinstance(text, str) for text in keys.values()):
            raise ProtocolError("the source's manifest has no texts for its keys")
        found = []
        for row in tensors if isinstance(tensors, list) else [None]:
            match row:
                case [int(number), str(path), str(dtype), list(shape)]:
                    found.append((number, path, dtype, shape))
                case _:
                    raise ProtocolError("the source's manifest does not describe its tensors")
        return keys, found

    def shared(self) -> Groups:
        """The groups of leaves that share memory at the source.

        Raises:
            ProtocolError: they are something else
        """
        groups = []
        try:
            for rows in self._fields.get("shared", []):
                layouts = [Layout(leaf, offset, tuple(strides), bits) for leaf, offset, strides, bits in rows]
                numbers = [n for row in layouts for n in (row.leaf, row.offset, row.bits, *row.strides)]
                if not all(type(n) is int for n in numbers):
                    raise TypeError("it is made of numbers")
                groups.append(layouts)
        except (TypeError, ValueError) as e:
            raise ProtocolError(f"the source's manifest does not say which tensors share memory: {e}") from e
        return groups
