"""A place in an object store, for code that has a folder or a file there.

It has those methods of ``pathlib.Path`` that such code calls, so that the code need not ask where a checkpoint is. A
store has no folders: every prefix of a key counts as one in which something is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ... import _validate
from ...errors import IncompleteCheckpoint, InvalidArgument, ProtocolError, SourceChanged, StoreRefused
from . import client
from .answers import NOT_IMPLEMENTED, is_missing, kind_of, status_of
from .reader import RangeReader
from .requests import Calls, Deadline
from .url import StoreUrl, parsed

#: Seconds that a save or a load may take, unless the caller says how many.
TIMEOUT_S = 600.0
_NEVER_S = 1e9


@dataclass(frozen=True)
class ObjectStat:
    """What a store tells of an object, by the names that the system has for files.

    Attributes:
        st_size: its length in bytes
        st_mtime: when it was written, in seconds since the epoch, by the clock of the store
        tag: identifies its content, for conditional requests; ``None`` if the store has no such thing
        version: its version, in stores that have versions
    """

    st_size: int
    st_mtime: float
    tag: str | None = None
    version: str | None = None

    @property
    def st_mtime_ns(self) -> int:
        """When it was written, in nanoseconds since the epoch."""
        return int(self.st_mtime * 1e9)


class ObjectPlace:
    """A place in an object store.

    Args:
        url: its URL
        options: those of obstore's store, and ``client_options``, ``retry_config`` and ``credential_provider``
        timeout: seconds that an operation may take: all requests of a save, or of a load
        deadline: of an operation that has begun
        by: makes the requests of that operation; ``None`` if none was made yet

    Raises:
        InvalidArgument: the URL or an option cannot be used
    """

    def __init__(
        self,
        url: str | StoreUrl,
        options: Mapping[str, Any] | None = None,
        timeout: float = TIMEOUT_S,
        deadline: Deadline | None = None,
        by: client.Client | None = None,
    ) -> None:
        self.url = url if isinstance(url, StoreUrl) else parsed(url)
        self.options = client.options_of(options)
        self.timeout = timeout
        self._deadline = deadline
        self._by = by

    @classmethod
    def of(cls, url: str, name: str, options: Mapping[str, Any] | None, timeout: timedelta | None) -> ObjectPlace:
        """Returns the place of a user's argument ``name``.

        Raises:
            InvalidArgument: as for the class; or ``timeout`` is no time to wait, or obstore is not installed
            SystemRefused: obstore cannot be loaded
        """
        parsed_url = parsed(url, name)
        place = cls(parsed_url, options, TIMEOUT_S if timeout is None else _seconds(timeout))
        _ = place.store  # which checks the options
        return place

    def begun(self, at_most: float | None = None) -> ObjectPlace:
        """Returns the same place in an operation that begins now, with one deadline for all its requests.

        Args:
            at_most: seconds that the operation may take, if the place has more
        """
        seconds = self.timeout if at_most is None else min(at_most, self.timeout)
        return ObjectPlace(self.url, self.options, seconds, Deadline(seconds))

    def patient(self) -> ObjectPlace:
        """Returns the same place in an operation that begins now, and that its caller ends: it has no deadline."""
        return ObjectPlace(self.url, self.options, self.timeout, Deadline(_NEVER_S))

    def end(self) -> None:
        """Ends all requests of the operation that has begun here, also those that are under way in other threads."""
        if self._deadline is not None:
            self._deadline.end()

    def seconds_left(self) -> float:
        """Returns how many seconds the operation that has begun here may take from now on."""
        return self.timeout if self._deadline is None else self._deadline.left()

    def calls(self) -> Calls:
        """Returns requests of this operation that end together."""
        return Calls(self._deadline or Deadline(self.timeout), self._client)

    @property
    def _client(self) -> client.Client:
        if self._by is None or self._deadline is None:
            self._by = client.client_of(self.url.root, self.options, self.timeout)
        return self._by

    @property
    def store(self) -> Any:
        """What the library makes requests by."""
        return self._client.store

    @property
    def key(self) -> str:
        """The key of the object, or what the keys of those in the folder begin with, without a slash at its end."""
        return self.url.key

    @property
    def name(self) -> str:
        """The last name of the key."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name, with its dot."""
        return os.path.splitext(self.name)[1]

    @property
    def parent(self) -> ObjectPlace:
        """The folder in which it is."""
        return self._at(self.key.rpartition("/")[0])

    def _at(self, key: str) -> ObjectPlace:
        return ObjectPlace(StoreUrl(self.url.root, key), self.options, self.timeout, self._deadline, self._by)

    def __truediv__(self, name: str) -> ObjectPlace:
        return self._at(f"{self.key}/{name}" if self.key else name)

    def with_name(self, name: str) -> ObjectPlace:
        """Returns the place called ``name`` in the same folder."""
        return self.parent / name

    def __str__(self) -> str:
        return str(self.url)

    def __repr__(self) -> str:
        return f"ObjectPlace({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPlace) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __lt__(self, other: ObjectPlace) -> bool:
        return self.url < other.url

    def __reduce__(self) -> tuple[Any, ...]:
        if "credential_provider" in self.options:
            raise InvalidArgument("a credential_provider cannot be sent to another process: use the environment")
        return _unpickled, (str(self), dict(self.options), self.timeout)

    def _ranges(self) -> tuple[str, int, RangeReader]:
        """What the engine reads: the name, the length, and what reads."""
        opened = self.opened()
        return str(self), opened.nbytes, opened

    def opened(self) -> RangeReader:
        """Returns what reads the object as it is now; raises as :class:`RangeReader`."""
        return RangeReader(self.store, self.key, str(self), self.calls())

    def read_bytes(self, most: int = 1 << 30) -> bytes:
        """Returns all bytes of the object, of which there may be ``most``.

        Raises:
            IncompleteCheckpoint: there is no such object
            ProtocolError: it has more bytes
            TensorferryError: it cannot be read
        """
        return self.opened().whole(most)

    def stat(self) -> ObjectStat:
        """Returns what the store tells of the object.

        Raises:
            IncompleteCheckpoint: there is none
            TensorferryError: the store does not answer, or refuses
        """
        store, key = self.store, self.key
        if not key:
            raise IncompleteCheckpoint(f"{self}: there is no such object")
        return stat_of(self.calls().call(lambda: client.obstore().head_async(store, key), str(self), "asking for it"))

    def is_file(self) -> bool:
        """Whether there is such an object.

        Raises:
            TensorferryError: the store does not answer, or refuses
        """
        try:
            self.stat()
        except IncompleteCheckpoint as e:
            if is_missing(e):
                return False
            raise
        return True

    @property
    def may_be_file(self) -> bool:
        """Whether its name is one that files of states have: not every store answers well to other questions."""
        return self.suffix in (".safetensors", ".pt", ".pth", ".bin", ".json")

    def is_dir(self) -> bool:
        """Whether there is an object whose key begins with this one and a slash; raises as :meth:`stat`."""
        store, prefix = self.store, self.key or None

        async def is_any() -> bool:
            async for objects in client.obstore().list(store, prefix=prefix, chunk_size=1):
                return bool(objects)
            return False

        return self.calls().call(is_any, str(self), "listing it")

    def write_bytes(self, data: bytes) -> None:
        """Puts ``data`` in the place of what is there, in one step; raises as :meth:`put`."""
        self.put(data, "overwrite")

    def put(self, data: bytes, mode: Any) -> float:
        """Puts ``data`` there in one step, and looks whether the store has kept it.

        Args:
            data: the content
            mode: as for obstore: ``"overwrite"``, ``"create"``, or the tag and version of what is to be replaced

        Returns:
            When it was written, in seconds since the epoch, by the clock of the store.

        Raises:
            SourceChanged: something is there already, or something else than what was to be replaced or was written
            TensorferryError: the store does not answer, or refuses; the object may be written then
            StoreRefused: as for :meth:`check_kept`
        """
        store, key, library = self.store, self.key, client.obstore()
        once = store if mode == "overwrite" else self._client.store_once

        async def put() -> Any:
            try:
                return await library.put_async(once, key, data, mode=mode, use_multipart=False)
            except Exception as e:
                # The client would ask a store without conditional writes for half a minute.
                if once is store or kind_of(e) != "GenericError" or status_of(e) == NOT_IMPLEMENTED:
                    raise
            return await library.put_async(store, key, data, mode=mode, use_multipart=False)

        told = self.calls().call(put, str(self), "writing it")
        old = mode.get("e_tag") if isinstance(mode, dict) else None
        kept = self.check_kept(len(data), told.get("e_tag"), old)
        if kept is None and self.read_bytes() != data:
            raise SourceChanged(f"{self}: writing it: another writer has replaced it, or the store has not kept it")
        return (kept or self.stat()).st_mtime

    def check_kept(self, nbytes: int, tag: str | None = None, old: str | None = None) -> ObjectStat | None:
        """Looks at an object that was written; returns what the store says of it if its tag tells that it is that.

        Args:
            nbytes: how many bytes were written
            tag: what the store has told of them, if it tells of another writer's by that
            old: the tag of what was replaced

        Raises:
            StoreRefused: the store has kept nothing, or another number of bytes, and has said that all is well
            TensorferryError: the store does not answer, or refuses
        """
        kept = 0
        try:
            about = self.stat()
        except IncompleteCheckpoint as e:
            if not is_missing(e):
                raise
        else:
            is_known = None not in (tag, about.tag)
            if not is_known or about.tag == tag:
                kept = about.st_size
                if kept == nbytes:
                    return about if is_known else None
            elif about.tag != old:
                return None
        raise StoreRefused(
            f"{self}: writing it: the store has kept {kept} bytes of {nbytes}, and has said that all is well: do not "
            "trust it with checkpoints"
        )


def _seconds(timeout: timedelta) -> float:
    if (seconds := _validate.patience("timeout", timeout)) <= 0:
        raise InvalidArgument("timeout must be longer than no time at all")
    return seconds


def _unpickled(url: str, options: dict[str, Any], timeout: float) -> ObjectPlace:
    return ObjectPlace(url, options, timeout)


def stat_of(meta: Any) -> ObjectStat:
    """Returns what the library tells of an object."""
    written: datetime = meta["last_modified"]
    size = int(meta["size"])
    if size < 0:
        raise ProtocolError("the store says that an object has less than no bytes")
    return ObjectStat(size, written.timestamp(), meta.get("e_tag"), meta.get("version"))
