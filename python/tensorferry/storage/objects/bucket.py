"""The objects below a place in a bucket, as a backend of ``stores.py``: writes on a condition in place of locks."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..._native import Parts, _check_machine_has
from ...errors import (
    ConnectError,
    FetchTimeout,
    IncompleteCheckpoint,
    SourceChanged,
    StoreRefused,
    TensorferryError,
)
from ..container import Container
from ..names import BEGINNINGS
from . import client
from .answers import DEBUG, Unsupported, is_missing, is_not_found
from .place import ObjectPlace, ObjectStat, stat_of
from .reader import RangeReader

logger = logging.getLogger("tensorferry")

#: The buckets of stores without conditional writes, or without tags for a condition, of which a warning has told.
_warned: set[str] = set()
#: After which errors an object may have been written all the same.
_UNSURE = (SourceChanged, ConnectError, FetchTimeout, StoreRefused)
#: How many objects are removed at a time.
_BATCH = 500
#: How many keys a store lists at a time.
_PAGE = 1000
#: How the names of buckets end that do not list keys in their order.
_UNSORTED = "--x-s3"


class BucketStore:
    """The objects below a place."""

    #: Whether a write may be made although it has failed.
    may_be_late = True
    absent = "create"
    #: Seconds between two looks, which stores bill, at first and at most.
    pauses = 0.1, 2.0

    def __init__(self, place: ObjectPlace) -> None:
        self.place = place

    def entries(self, *beginnings: str) -> dict[str, ObjectStat]:
        """Returns the objects directly below; keys of others cost no more than a page."""
        return self._list(*beginnings)[0]

    def subfolders(self) -> list[str]:
        """Returns the names of the folders directly below."""
        return sorted(self._list()[1])

    def _list(self, *beginnings: str) -> tuple[dict[str, ObjectStat], list[str]]:
        return self.place.calls().call(lambda: self._listed(beginnings), str(self.place), "listing it")

    async def _listed(self, beginnings: tuple[str, ...]) -> tuple[dict[str, ObjectStat], list[str]]:
        store, library = self.place.store, client.obstore()
        prefix = f"{self.place.key}/" if self.place.key else ""
        if beginnings and not self.place.url.root.endswith(_UNSORTED):
            with contextlib.suppress(library.exceptions.InvalidPathError):
                return await self._beginning_with(store, prefix, sorted(beginnings)), []
        try:
            answer = await library.list_with_delimiter_async(store, prefix=prefix or None)
        except library.exceptions.InvalidPathError as e:
            raise StoreRefused(
                f"{self.place}: the client for stores cannot list it, because of one object there: "
                f"{str(e).partition(DEBUG)[0]}. Remove that object, or give it another key"
            ) from None
        below = [folder.removeprefix(prefix).rstrip("/") for folder in answer["common_prefixes"]]
        found = {meta["path"].removeprefix(prefix): stat_of(meta) for meta in answer["objects"]}
        return {name: about for name, about in found.items() if name and name.startswith(beginnings or "")}, below

    async def _beginning_with(self, store: Any, prefix: str, beginnings: list[str]) -> dict[str, ObjectStat]:
        """Lists from the first beginning on; goes on with a new list behind a page of other keys."""
        found: dict[str, ObjectStat] = {}
        while beginnings:
            first = beginnings[0]
            # A key that is the beginning itself comes behind this one.
            offset = f"{prefix}{first[:-1]}{chr(ord(first[-1]) - 1)}~"
            async for objects in client.obstore().list(store, prefix=prefix or None, offset=offset, chunk_size=_PAGE):
                names = [(meta["path"].removeprefix(prefix), meta) for meta in objects]
                found |= {
                    name: stat_of(meta)
                    for name, meta in names
                    if "/" not in name and name.startswith(tuple(beginnings))
                }
                if len(names) < _PAGE:
                    return found
                if (last := names[-1][0]) > first and not last.startswith(first):
                    break
            else:
                return found
            beginnings = [one for one in beginnings if one > last or last.startswith(one)]
        return found

    def stat(self, name: str) -> ObjectStat | None:
        """Returns what the store says of an object."""
        try:
            return (self.place / name).stat()
        except IncompleteCheckpoint as e:
            if is_missing(e):
                return None
            raise

    def open(self, name: str) -> tuple[RangeReader | None, Any]:
        """Returns what reads an object as it is now, and the condition under which that one is replaced."""
        try:
            opened = (self.place / name).opened()
        except IncompleteCheckpoint as e:
            if is_missing(e):
                return None, self.absent
            raise
        return opened, opened.version or None

    def read(self, name: str, most: int | None) -> bytes:
        """Returns the content of an object."""
        opened = (self.place / name).opened()
        _check_machine_has(opened.nbytes, str(self.place / name))
        return opened.whole(opened.nbytes if most is None else most)

    def write(self, name: str, data: bytes, *_: object, **__: object) -> None:
        """Puts an object there in one step."""
        (self.place / name).put(data, "overwrite")

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects; those that are not there count as removed."""
        store, calls, keys = self.place.store, self.place.calls(), sorted((self.place / name).key for name in names)
        for first in range(0, len(keys), _BATCH):
            batch = keys[first : first + _BATCH]
            calls.call(lambda batch=batch: _removed(store, batch), str(self.place), "removing objects")  # type: ignore[misc]

    @contextlib.contextmanager
    def holding(self, names: Iterable[str]) -> Iterator[Mapping[str, ObjectStat]]:
        """Nothing is locked: what no index names stays for a day."""
        listed = self.entries(*BEGINNINGS, ".metadata", "__", "checkpoint_")
        if gone := sorted(set(names) - listed.keys()):
            raise IncompleteCheckpoint(
                f"{self.place}: {gone[0]}, which this save has written, was removed by another process"
            )
        yield listed

    @property
    def compares(self) -> bool:
        """Whether an index is replaced on a condition."""
        return self.place.url.root not in _warned

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nothing is locked: writes are conditional instead."""
        yield

    @contextlib.contextmanager
    def new_index(self, name: str, content: Container) -> Iterator[Callable[[Any], float]]:
        """Writes the index in place of the one with the given version."""
        index, data = self.place / name, _encoded(content)

        def put(version: Any) -> float:
            try:
                return _put(index, data, version)
            except _UNSURE:
                # It may have been written, and the answer was lost. No other save writes these bytes.
                if not _is_there(index, data):
                    raise
                return index.stat().st_mtime

        yield put

    def remove_dead(
        self,
        names: Mapping[str, ObjectStat],
        now: float,
        abandoned: float,
        needed: Callable[[], set[str]],
    ) -> None:
        """Removes objects a day after they were written, by the clock of the store."""
        if dead := {name for name, about in names.items() if now - about.st_mtime > abandoned}:
            self.remove(dead - needed())

    def create(self) -> bool:
        """Creates nothing: a store has no folders."""
        return False

    def sync(self) -> None:
        """Does nothing: what was written is safe."""

    def remove_if_empty(self) -> None:
        """Does nothing: a store has no folders."""


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


def _encoded(container: Container) -> bytes:
    """Returns all bytes of a small container."""
    parts = Parts(rows=container.rows, control=list(container.control), metadata=container.metadata)
    buffer = ctypes.create_string_buffer(-(-parts.nbytes // 512) * 512)
    nbytes = parts.fill(ctypes.addressof(buffer), len(buffer))
    return buffer.raw[:nbytes]


def _put(place: ObjectPlace, data: bytes, mode: Any) -> float:
    """Writes on a condition, where the store has conditions; returns when it was written, by the store's clock."""
    root = place.url.root
    if root not in _warned:
        try:
            if mode is not None:
                return place.put(data, mode)
        except Unsupported:
            pass
        # It is not asked again: the client takes half a minute to believe it.
        _warned.add(root)
        logger.warning(
            "%s: this store has no conditional writes: if two jobs save into one place, a checkpoint may be lost "
            "that was committed. Let only one job save there",
            root,
        )
        if isinstance(mode, dict):
            # What was seen may be of long ago.
            raise SourceChanged(f"{place}: writing it: another writer may have changed it meanwhile")
    if mode == "create" and place.is_file():
        raise SourceChanged(f"{place}: writing it: something is there already")
    return place.put(data, "overwrite")


def _is_there(place: ObjectPlace, data: bytes) -> bool:
    try:
        return place.read_bytes() == data
    except TensorferryError:
        return False


async def _removed(store: Any, keys: list[str]) -> None:
    try:
        await client.obstore().delete_async(store, keys if len(keys) > 1 else keys[0])
    except Exception as e:
        if not is_not_found(e):
            raise
        if len(keys) > 1:
            # It does not say which one was missing, and may have left those behind it.
            for key in keys:
                await _removed(store, [key])
