"""Puts the index of a save into a store, in place of the one that was looked at and no other; objects where none is."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ..._native import Parts
from ...errors import (
    ConnectError,
    FetchTimeout,
    IncompleteCheckpoint,
    SourceChanged,
    StoreRefused,
    TensorferryError,
)
from ..container import Container
from .answers import Unsupported, is_missing
from .place import ObjectPlace

logger = logging.getLogger("tensorferry")

#: How often a commit looks again at an index that others replace meanwhile.
_ATTEMPTS = 20
#: The buckets of stores without conditional writes, and without tags for a condition, of which a warning has told.
_warned: set[str] = set()
_warned_of_tags: set[str] = set()
#: After which errors an object may have been written all the same.
_UNSURE = (SourceChanged, ConnectError, FetchTimeout, StoreRefused)

_T = TypeVar("_T")


def encoded(container: Container) -> bytes:
    """Returns all bytes of a small container."""
    parts = Parts(rows=container.rows, control=list(container.control), metadata=container.metadata)
    buffer = ctypes.create_string_buffer(-(-parts.nbytes // 512) * 512)
    nbytes = parts.fill(ctypes.addressof(buffer), len(buffer))
    return buffer.raw[:nbytes]


def put_index(index: ObjectPlace, content: Container, look: Callable[[], _T]) -> _T:
    """Writes an index, unless another writer replaces the old one after the last look at it: then it looks again.

    In a store without tags or conditional writes, the old one is replaced without a condition.

    Args:
        index: the index
        content: what is written
        look: looks at the index that is there, and raises if it may not be replaced; it may be called several times

    Returns:
        What the last look has returned.

    Raises:
        SourceChanged: other writers have replaced it again and again
        TensorferryError: the store does not answer, or refuses; the index may be written then
        Exception: what ``look`` raises
    """
    data = encoded(content)
    for _ in range(_ATTEMPTS):
        # The tag before the look: if the index changes in between, the tag is outdated, and the write is refused.
        mode = _mode(index)
        seen = look()
        try:
            _put(index, data, mode)
        except _UNSURE as e:
            if _is_there(index, data):
                # It was written, and the answer was lost.
                return seen
            if not isinstance(e, SourceChanged):
                raise
            continue
        return seen
    raise SourceChanged(f"{index}: other saves have replaced it again and again: let only one job save there")


def put_new(place: ObjectPlace, data: bytes) -> None:
    """Writes an object where none is; one that is there with the same content counts as written.

    In a store without conditional writes, an object that appears right after the look for one is replaced.

    Raises:
        SourceChanged: there is one with other content
        TensorferryError: the store does not answer, or refuses; the object may be written then
    """
    try:
        _put(place, data, "create")
    except _UNSURE:
        # It may have been written, and the answer was lost.
        if not _is_there(place, data):
            raise


def _mode(index: ObjectPlace) -> Any:
    """Returns the condition under which the index that is there now may be replaced."""
    try:
        about = index.stat()
    except IncompleteCheckpoint as e:
        if is_missing(e):
            return "create"
        raise
    known = {"e_tag": about.tag, "version": about.version}
    return {name: value for name, value in known.items() if value is not None} or "overwrite"


def _put(index: ObjectPlace, data: bytes, mode: Any) -> None:
    if mode == "overwrite":
        _warn(index, _warned_of_tags)
    elif index.url.root not in _warned:
        try:
            index.put(data, mode)
            return
        except Unsupported:
            # It is not asked again: the client takes half a minute to believe it.
            _warn(index, _warned)
    if mode == "create" and index.is_file():
        raise SourceChanged(f"{index}: writing it: something is there already") from None
    index.put(data, "overwrite")


def _warn(index: ObjectPlace, warned: set[str]) -> None:
    """Warns once of a store in which an index is replaced without a condition; ``warned`` has those it was done for."""
    if index.url.root not in warned:
        warned.add(index.url.root)
        logger.warning(
            "%s: this store has no conditional writes: if two jobs save into one place, a checkpoint may be lost "
            "that was committed. Let only one job save there",
            index.url.root,
        )


def _is_there(index: ObjectPlace, data: bytes) -> bool:
    """Whether the index that is there is the one with these bytes, which no other save writes."""
    try:
        return index.read_bytes() == data
    except TensorferryError:
        return False
