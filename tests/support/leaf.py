"""What a catalogue of leaves says of each of them."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import _serialization

if TYPE_CHECKING:
    from collections.abc import Callable

WHOLE, CHUNKED = 0, 3
BOTH = frozenset({WHOLE, CHUNKED})
ONLY_WHOLE = frozenset({WHOLE})
NEITHER: frozenset[int] = frozenset()


def _torch_reads_empty_storages() -> bool:
    body = io.BytesIO()
    _serialization._streaming_save(torch.empty(0), body)
    body.seek(0)
    try:
        _serialization._streaming_load(body)
    except ValueError:
        return False
    return True


# torchft hands on what torch can read: torch 2.8 fails on a storage without bytes (pytorch#180481).
BOTH_IF_EMPTY = BOTH if _torch_reads_empty_storages() else NEITHER


@dataclass(frozen=True)
class Leaf:
    """A value at `state["user"]["leaf"]`, or the whole state if `root`, and what is to be expected of it."""

    name: str
    make: Callable[[], Any]
    expect: Callable[[Any], Any] = lambda value: value
    """What the receiver gets, made from the value that was sent."""
    torchft: frozenset[int] = BOTH
    """The chunk counts with which torchft's transport hands it over equal."""
    lax: frozenset[str] = frozenset()
    """What torchft loses even with the whole state in one body (see equality)."""
    trust: bool = False
    """Holds classes or functions of the test modules, which the default allow-list refuses."""
    refused: bool = False
    """Cannot be carried: send_checkpoint names its path."""
    group: bool = False
    """Needs a process group."""
    warns: tuple[str, ...] = ()
    """Warnings torch itself gives while such a leaf is pickled or built, as filterwarnings entries."""
    root: bool = False

    def value(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # prototype and deprecation notes of the constructors used
            return self.make()

    def state(self, value: Any) -> Any:
        if self.root:
            return value
        return {
            "user": {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "leaf": value, "last": torch.ones(3)},
            "torchft": {"step": 7, "batches_committed": 14},
        }
