"""What a state's tensors and values become when another state comes into it: one rule for every door."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from equality import assert_same_state
from in_place_doors import STATE_DOORS, Door
from pickled_classes import Colour, DictSubclass, Holder, ListSubclass, Point, Settings
from tensorferry import StateMismatch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.timeout(120), pytest.mark.beyond_torchft]

NAMES = [Colour, DictSubclass, Holder, ListSubclass, Point, Settings]
each_door = pytest.mark.parametrize("door", STATE_DOORS, ids=lambda door: door.__name__)


def values() -> list[Any]:
    """Values of each kind that is no tensor and no dict, and holds no tensors."""
    return [
        1, 0.5, True, None, 1j, "text", b"bytes", np.float64(2), np.float32(0.5), np.bool_(True), np.int64(7),
        np.arange(3), Colour.RED, Settings(0.5, torch.ones(2)), [], [1.0], [0.0, 2.0], [[1], [2, 3]], [{"lr": 1}], (),
        (1, "a"), ((0.5,), [2]), Point(1, 2), deque([1, 2], maxlen=5), deque(), ListSubclass([1]), {1, 2},
        torch.float32, torch.Size([2, 3]),
    ]  # fmt: skip


@each_door
def test_the_value_of_the_checkpoint_replaces_each_other_value(door: Door, tmp_path: Path) -> None:
    saved = {f"{i}-{j}": value for i, value in enumerate(values()) for j, _ in enumerate(values())}
    live = {f"{i}-{j}": value for i, _ in enumerate(values()) for j, value in enumerate(values())}
    expected = copy.deepcopy(saved)
    assert_same_state(
        door({"w": torch.ones(2), **saved}, {"w": torch.zeros(2), **live}, tmp_path, NAMES),
        {"w": torch.ones(2), **expected},
    )


def one(value: float = 1.0) -> torch.Tensor:
    return torch.full((2,), value)


def zero() -> torch.Tensor:
    return torch.zeros(2)


def groups(*lrs: Any) -> list[dict[str, Any]]:
    return [{"lr": lr, "betas": (0.9, 0.99), "params": [number]} for number, lr in enumerate(lrs)]


#: What is in the checkpoint, what is in its place here, and what is wrong with that, if anything is.
PAIRS: list[tuple[Any, Any, str | None]] = [
    (one(), zero(), None),
    (one(), 5, None),
    (one(), None, None),
    (one(), [0], None),
    (torch.tensor(3.0), 0.0, None),
    (torch.tensor(3.0), torch.zeros(1), r"x: torch\.float32 \[1\] here, torch\.float32 \[\]"),
    (one().double(), zero(), r"x: torch\.float32 \[2\] here, torch\.float64 \[2\]"),
    (5, zero(), "x: Tensor here, "),
    (np.arange(2), zero(), "x: Tensor here, "),
    ([one()], zero(), "x: Tensor here, list"),
    ({"a": one()}, zero(), "x: Tensor here, dict"),
    # Lists.
    ([0.0, 2.0], [1.0], None),
    ([one(), one()], [], None),
    ([one()], [None], None),
    ([one(), one(2.0)], [zero(), zero()], None),
    ([one(), 3], [zero(), "a"], None),
    ([one(), [1, 2]], [zero(), [9]], None),
    ([one(), one()], [zero()], "x: a list of 1 here, of 2"),
    ([], [zero()], "x: a list of 1 here, of 0"),
    ([1, 2, 3], [zero()], "x: a list of 1 here, of 3"),
    ([3], [zero()], r"x[.\[]0\]?: Tensor here, "),
    ([[one()], [one()]], [[zero()], [zero(), zero()]], r"x[.\[]1\]?: a list of 2 here, of 1"),
    ((one(),), [zero()], "x: list here, tuple"),
    ({"a": one()}, [zero()], "x: list here, dict"),
    # Tuples and deques.
    ((1, 2), (0,), None),
    ((one(), 2), (zero(), 0), None),
    ((one(),), (zero(), zero()), "x: a tuple of 2 here, of 1"),
    (Point(one(), 2), Point(zero(), 0), None),
    (Point(1, 2), (5,), None),
    (Point(one(), 2), Point(zero(), zero()), r"x[.\[](1\]?|y): Tensor here, "),
    ([one()], (zero(),), "x: tuple here, list"),
    (deque([one()], maxlen=3), deque([zero()]), None),
    (deque([one(), one()]), deque([zero()]), "x: a deque of 1 here, of 2"),
    # Dicts.
    ({"a": 1}, 5, None),
    (5, {"a": 1}, None),
    ({"a": one(), "b": 0.5}, {"a": zero(), "b": 1}, None),
    (5, {"a": zero()}, "x: dict here, "),
    ([one()], {"a": zero()}, "x: dict here, list"),
    (OrderedDict(a=one()), OrderedDict(a=zero()), None),
    (defaultdict(list, a=[one()]), defaultdict(list, a=[zero()]), None),
    ({"a": {"b": [one()]}}, {"a": {"b": [zero(), zero()]}}, r"x\.a\.b: a list of 2 here, of 1"),
    # Subclasses of containers are objects, and so is whatever holds tensors as attributes.
    (ListSubclass([1]), ListSubclass([zero()]), None),
    (Holder(w=one()), Holder(w=zero()), None),
    (Settings(0.5, one()), Settings(1, zero()), None),
    # Optimizers.
    (groups(0.5), groups(1, 1), None),
    (groups(0.5, 0.5), groups(1), None),
    (groups(torch.tensor(0.5)), groups(torch.tensor(0.1)), None),
    (groups(0.5), groups(torch.tensor(0.1)), r"x[.\[]0\]?\.lr: Tensor here, "),
    (groups(torch.tensor(0.5)), groups(torch.tensor(0.1), 0.1), "x: a list of 2 here, of 1"),
    ({"state": {0: {"step": torch.tensor(3.0), "m": one()}}, "param_groups": groups(0.5)},
     {"state": {0: {"step": torch.tensor(0.0), "m": zero()}}, "param_groups": groups(1, 1)}, None),
    ({"state": {0: {"step": 3, "m": one()}}, "param_groups": groups(0.5)},
     {"state": {0: {"step": torch.tensor(0.0), "m": zero()}}, "param_groups": groups(1)},
     r"x\.state\.0\.step: Tensor here, "),
]  # fmt: skip


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(("saved", "live", "wrong"), PAIRS)
def test_a_tensor_takes_a_tensor_and_nothing_else(saved: Any, live: Any, wrong: str | None, tmp_path: Path) -> None:
    for door in STATE_DOORS:
        (path := tmp_path / door.__name__).mkdir()
        target: dict[str, Any] = copy.deepcopy({"first": torch.zeros(1 << 14), "x": live, "last": torch.zeros(4)[::2]})
        source = copy.deepcopy({"first": torch.ones(1 << 14), "x": saved, "last": torch.ones(4)[::2]})
        before, own = copy.deepcopy(target), tensors_of(target)
        if wrong is not None:
            with pytest.raises(StateMismatch, match=rf"nothing was overwritten(?s:.*)\n  {wrong}"):
                door(source, target, path, NAMES)
            assert_same_state(target, before)
            continue
        loaded = door(source, target, path, NAMES)
        assert_same_state(loaded, source)
        found = {id(tensor) for tensor in tensors_of(loaded)}
        assert all(id(tensor) in found for tensor in own), "a tensor here was not filled, but replaced"


@each_door
def test_empty_views_behind_their_storage_and_negated_integers_come_through(door: Door, tmp_path: Path) -> None:
    def saved() -> dict[str, Any]:
        negated = torch._neg_view(torch.arange(3, dtype=torch.int32))
        return {"empty": torch.zeros(4, 6)[4:][:, 2:4], "negated": negated, "w": one()}

    live = {"empty": torch.zeros(0, 6)[:, 4:], "negated": torch.zeros(3, dtype=torch.int32), "w": zero()}
    loaded = door(saved(), live, tmp_path, NAMES)
    assert live["negated"].tolist() == [0, -1, -2]
    for name, tensor in live.items():
        assert loaded[name] is tensor
    (tmp_path / "new").mkdir()
    assert_same_state(door(saved(), {"empty": None, "negated": None, "w": None}, tmp_path / "new", NAMES), saved())
