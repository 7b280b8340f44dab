"""Plain containers are pickled natively, as Python would; what is more than that is left to Python."""

from __future__ import annotations

import collections
import copyreg
import io
import pickle
import pickletools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pickled_classes import DictSubclass, ListSubclass, StrSubclass
from random_states import EDGES, TEXTS
from tensorferry.state import pickling, tree

if TYPE_CHECKING:
    pass


def random_plain(draw: random.Random) -> list[Any]:
    """Returns objects of plain containers, some of which stand in several places, within themselves even."""
    made: list[Any] = []

    def node(levels: int) -> Any:
        if made and draw.randrange(5) == 0:
            return draw.choice(made)
        if not levels or draw.randrange(4) == 0:
            return draw.choice([None, True, 0.5, draw.choice(EDGES), *TEXTS[:8]])
        kind = draw.choice([list, tuple, dict, collections.OrderedDict])
        if kind is tuple:
            value: Any = tuple(node(levels - 1) for _ in range(draw.randrange(6)))
        elif kind is list:
            value = []
            made.append(value)
            value += [node(levels - 1) for _ in range(draw.randrange(4))]
        else:
            value = kind()
            made.append(value)
            for _ in range(draw.randrange(5)):
                value[draw.choice(["version", "", "é", 1, None, 2.5, (1, "a"), ("b", (2,)), 2**70])] = node(levels - 1)
            if value and kind is collections.OrderedDict:
                value.move_to_end(draw.choice(list(value)))
        made.append(value)
        return value

    return [node(5) for _ in range(draw.randrange(1, 6))]


def shape_of(value: Any, seen: dict[int, int]) -> Any:
    """Returns what a value is made of, and where its containers and keys stand again."""
    if not isinstance(value, list | tuple | dict):
        return type(value), repr(value)
    if value and id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return type(value), [(shape_of(key, {}), shape_of(one, seen)) for key, one in list(items)]


def objects_of(values: list[Any]) -> Any:
    """Returns a flattened state whose objects are ``values``."""
    flat = tree.Flat()
    flat.objects.extend(values)
    flat.object_paths.extend(f"o{n}" for n in range(len(values)))
    return flat


def test_plain_containers_are_what_pythons_pickler_makes_of_them() -> None:
    native = 0
    for seed in range(400):
        values = random_plain(random.Random(seed))
        flat = objects_of(values)
        if (pickled := pickling.plain(flat)) is None:
            continue
        native += 1
        data, names = pickled
        expected = pickling._Pickler(io.BytesIO(), flat)
        assert shape_of(pickle.loads(data), {}) == shape_of(pickle.loads(expected.all()), {}), seed
        assert names.keys() == expected.globals.keys(), seed
        pickletools.dis(data, out=io.StringIO())
    assert native > 80


def test_long_plain_containers_come_in_batches() -> None:
    for count in (999, 1000, 1001, 3500):
        values = [list(range(count)), {str(n): n for n in range(count)}, tuple(range(count))]
        values.append(collections.OrderedDict.fromkeys(range(count)))
        pickled = pickling.plain(objects_of(values))
        assert pickled is not None
        assert pickle.loads(pickled[0]) == values


def test_what_is_more_than_a_plain_container_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    itself: tuple[Any, ...] = ([],)
    itself[0].append(itself)
    marked = collections.OrderedDict(a=1)
    marked.note = "kept"  # type: ignore[attr-defined]
    others = [b"bytes", {2}, itself, marked, {"\ud800": 1}, DictSubclass(a=1), ListSubclass([1]), 2**70, torch.float32]
    for value in [*others, collections.defaultdict(int), {StrSubclass("s"): 1}]:
        assert pickling.plain(objects_of([1.5, [value]])) is None, value
    # Nor what copyreg was told about.
    flat = objects_of([collections.OrderedDict(a=1)])
    assert pickling.plain(flat) is not None
    monkeypatch.setitem(copyreg.dispatch_table, collections.OrderedDict, lambda value: (list, (list(value),)))
    assert pickling.plain(flat) is None
