"""An entry of the catalogue of leaves: how to make the value, and what each transport does with it."""

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


# torchft can receive what torch can read: torch 2.8 fails on a storage without bytes (pytorch#180481).
STOCK_READS_EMPTY = _torch_reads_empty_storages()
BOTH_IF_EMPTY = BOTH if STOCK_READS_EMPTY else NEITHER


@dataclass(frozen=True)
class Leaf:
    """A value at `state["user"]["leaf"]`, or the whole state if `root`, and what a receiver must get."""

    name: str
    make: Callable[[], Any]
    expect: Callable[[Any], Any] = lambda value: value
    """Makes what the receiver must get from the value that was sent."""
    torchft: frozenset[int] = BOTH
    """The values of `num_chunks` with which torchft's transport delivers it unchanged."""
    lax: frozenset[str] = frozenset()
    """The comparisons of equality.py that fail with torchft even with the whole state in one body."""
    trust: bool = False
    """Whether it holds classes or functions of the test modules, which the default allow-list refuses."""
    refused: bool = False
    """Whether `send_checkpoint` refuses it, with its path in the message."""
    group: bool = False
    """Whether it needs a process group."""
    warns: tuple[str, ...] = ()
    """Warnings that torch itself gives while such a leaf is built or pickled, as filterwarnings entries."""
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
