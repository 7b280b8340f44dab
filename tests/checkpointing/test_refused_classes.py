"""Leaves of classes that are not allowed: what does not ask for them loads, and one error names all of them."""

from __future__ import annotations

import argparse
import collections
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.errors import UnsafePickle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.beyond_torchft]


class Stage(enum.Enum):
    FIRST = 1


class Scaled(torch.Tensor):
    pass


@dataclass
class Config:
    value: Any


class Text:
    """Makes something else of its state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.value = str(state)


def noted() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(2))
    made.note = argparse.Namespace(a=1)
    return made


NAMESPACE = argparse.Namespace(a=1)
#: By name: a leaf, and the class in it that is not allowed, where ``Config`` and ``Text`` are.
LEAVES: dict[str, tuple[Any, str]] = {
    "object": (NAMESPACE, "argparse.Namespace"),
    "key": ({Stage.FIRST: torch.ones(3), "z": 2}, "Stage"),
    "tensor": (torch.ones(3).as_subclass(Scaled), "Scaled"),
    "parameter": (noted(), "argparse.Namespace"),
    "in an object": (Config([NAMESPACE]), "argparse.Namespace"),
    "in containers": (collections.OrderedDict(a=collections.deque([(NAMESPACE, 1)])), "argparse.Namespace"),
}
SAFE = (Config, Text)


def as_checkpoint(state: Any, folder: Path) -> Callable[..., Any]:
    SyncCheckpointer().save(folder / "checkpoint", state)
    return lambda target=None: SyncCheckpointer(safe_globals=SAFE).load(folder / "checkpoint", target)


def as_archive(state: Any, folder: Path) -> Callable[..., Any]:
    torch.save(state, folder / "state.pt")
    return lambda target=None: load_file(folder / "state.pt", target, safe_globals=SAFE)


DOORS = pytest.mark.parametrize("door", [as_checkpoint, as_archive])


@DOORS
@pytest.mark.parametrize("name", LEAVES)
def test_what_does_not_ask_for_it_loads(name: str, door: Callable[..., Any], tmp_path: Path) -> None:
    leaf, refused = LEAVES[name]
    load = door({"model": {"w": torch.arange(4.0)}, "x": leaf, "step": 5}, tmp_path)
    found = load({"model": {"w": torch.zeros(4)}, "step": 0})
    assert (found["model"]["w"].tolist(), found["step"], len(found)) == ([0, 1, 2, 3], 5, 2)
    asked = {"x": None, **({"x": {Stage.FIRST: torch.zeros(3)}} if name == "key" else {})}
    for target in (asked, None):
        with pytest.raises(UnsafePickle, match=refused):
            load(target)
    if name == "key":
        assert not asked["x"][Stage.FIRST].any()


@DOORS
def test_one_error_names_all(door: Callable[..., Any], tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "a": NAMESPACE, "b": Stage.FIRST, "c": [torch.__version__], "d": Config(NAMESPACE)}
    load = door(state, tmp_path)
    for target, names in ((None, {"a", "b", "c"}), ({"b": None, "c": None}, {"b", "c"}), ({"d": None}, {"a"})):
        with pytest.raises(UnsafePickle) as error:
            load(target)
        text = str(error.value)
        assert text.count("Namespace") == 2 * ("a" in names), text
        assert text.count("Stage") == 2 * ("b" in names), text
        assert text.count("TorchVersion") == 2 * ("c" in names), text


@DOORS
def test_code_of_the_users_is_given_nothing_that_is_not_allowed(door: Callable[..., Any], tmp_path: Path) -> None:
    """It could make a value of it in which nothing shows that."""
    load = door({"w": torch.ones(3), "x": Text(NAMESPACE)}, tmp_path)
    for target in ({"w": torch.zeros(3)}, {"x": None}, None):
        with pytest.raises(UnsafePickle, match=r"argparse\.Namespace"):
            load(target)
