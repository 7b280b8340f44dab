"""The globals that a pickle may name by default: one table, and for each of them what a pickle may do with it.

A pickle never gets a function of this table: its name yields a :class:`Function`, which is not callable and has no
attributes to set. A class of the table stands for itself, since it can be a value (the factory of a ``defaultdict``);
its :class:`Kind` says what a pickle may do with it. Both check all arguments before any code of torch, numpy or the
standard library sees them. docs/reference/pickles.md has the review, line by line.

The table holds names. When a pickle first names a row, its object is looked up in the module that the row names, so
that a receiver imports only what it needs. A peer's text selects a row and nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from . import numpy_arrays, stdlib, torch_classes, torch_tensors, torch_wrappers
from .kinds import Function, Globals, register

#: One module for each kind of globals, with the checks and the rows of its own.
_PARTS: tuple[Any, ...] = (stdlib, numpy_arrays, torch_classes, torch_tensors, torch_wrappers)


def _merged(parts: Iterator[Globals]) -> Globals:
    """Returns the rows of several tables as one."""
    rows: Globals = {}
    for part in parts:
        for module, own in part.items():
            rows.setdefault(module, {}).update(own)
    return rows


#: The classes: module, name, and the function that creates the ``Kind`` of the class.
_CLASSES = _merged(part.CLASSES for part in _PARTS)
#: The functions: module, name, and the checked function that runs in place of the named one.
_FUNCTIONS = _merged(part.FUNCTIONS for part in _PARTS)

#: Other names of rows, as older and newer versions of Python, numpy and torch write them.
_ALIASES: dict[tuple[str, str], tuple[str, str]] = {
    ("numpy.core.multiarray", "_reconstruct"): ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"): ("numpy._core.multiarray", "scalar"),
    **{("pathlib._local", name): ("pathlib", name) for name in _CLASSES["pathlib"]},
    ("torch", "UntypedStorage"): ("torch.storage", "UntypedStorage"),
    ("torch._C", "Generator"): ("torch", "Generator"),
    ("torch.distributed.tensor._api", "DTensor"): ("torch.distributed.tensor", "DTensor"),
    **{("torch.distributed.tensor", name): ("torch.distributed.tensor.placement_types", name) for name in (
        "Partial", "Replicate", "Shard",
    )},
    ("torch.distributed.device_mesh", "_MeshLayout"): ("torch.distributed._mesh_layout", "_MeshLayout"),
}  # fmt: skip

#: Values that are neither classes nor functions, by name.
_VALUES: dict[tuple[str, str], Any] = {
    ("builtins", "Ellipsis"): ...,
    ("builtins", "NotImplemented"): NotImplemented,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype | torch.qscheme)},
}

_objects: dict[tuple[str, str], Any] = {}


def names() -> list[tuple[str, str]]:
    """Returns module and name of every row of the table, aliases included."""
    own = [(module, name) for table in (_CLASSES, _FUNCTIONS) for module, rows in table.items() for name in rows]
    return [*own, *_ALIASES, *_VALUES]


def has(module: str, name: str) -> bool:
    """Whether the table has a row with this name."""
    module, name = _ALIASES.get((module, name), (module, name))
    return name in _CLASSES.get(module, ()) or name in _FUNCTIONS.get(module, ()) or (module, name) in _VALUES


def find(module: str, name: str) -> Any:
    """Returns the object of a row; for a function, a :class:`Function`.

    Raises:
        LookupError: the table has no such row, or the object does not exist in this process
    """
    key = _ALIASES.get((module, name), (module, name))
    if key in _objects:
        return _objects[key]
    if key in _VALUES:
        return _VALUES[key]
    module, name = key
    if (run := _FUNCTIONS.get(module, {}).get(name)) is not None:
        return _objects.setdefault(key, Function(f"{module}.{name}", run))
    kind = _CLASSES[module][name]
    try:
        cls: Any = importlib.import_module(module)
        for part in name.split("."):
            cls = getattr(cls, part)
    except (ImportError, AttributeError) as e:
        raise LookupError(f"{module}.{name} does not exist in this process") from e
    register(cls, kind)
    return _objects.setdefault(key, cls)


# A pickle can have leaves of these classes, as references, without naming the classes.
find("torch", "Tensor")
find("torch.nn.parameter", "Parameter")
