"""Classes and functions whose pickles name this module, which no receiver's default allow-list has."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Settings:
    lr: float
    weight: torch.Tensor
    names: list[str] = field(default_factory=list)


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any) -> None:
        self.left = left
        self.right = right


class DictSubclass(dict):
    pass


class ListSubclass(list):
    pass


class StrSubclass(str):
    __slots__ = ("__dict__",)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Key(enum.StrEnum):
    WEIGHT = "weight"
    BIAS = "bias"


class PlainSubclass(torch.Tensor):
    pass


class ReducedWrapper(torch.Tensor):
    """A wrapper subclass with a `__reduce_ex__` of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> ReducedWrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ReducedWrapper, (self.inner,)

    def __repr__(self) -> str:
        return f"ReducedWrapper({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"{func}")


class FlattenWrapper(torch.Tensor):
    """A wrapper subclass with the methods that torch.compile requires: `__tensor_flatten__` and its inverse."""

    @staticmethod
    def __new__(cls, low: torch.Tensor, scale: torch.Tensor, note: str) -> FlattenWrapper:
        return torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=scale.dtype, device=low.device)

    def __init__(self, low: torch.Tensor, scale: torch.Tensor, note: str) -> None:
        self.low = low
        self.scale = scale
        self.note = note

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["low", "scale"], self.note

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> FlattenWrapper:
        return cls(inner["low"], inner["scale"], context)

    def __repr__(self) -> str:
        return f"FlattenWrapper({self.low!r}, {self.scale!r}, {self.note!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].low, args[0].scale, args[0].note)
        raise NotImplementedError(f"{func}")


class Box:
    """A custom pytree node: two children and a context."""

    def __init__(self, first: Any, second: Any, label: Any) -> None:
        self.first = first
        self.second = second
        self.label = label


class FailsToPickle:
    def __reduce__(self) -> Any:
        raise ValueError("no pickle of this one")


pytree.register_pytree_node(
    Box,
    lambda box: ([box.first, box.second], box.label),
    lambda children, label: Box(*children, label),
    serialized_type_name="tests.pickled_classes.Box",
)


def a_function(x: Any) -> Any:
    return x
