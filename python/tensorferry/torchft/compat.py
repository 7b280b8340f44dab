"""Sends and receives torchft 0.2.0's own format, so that a fleet can be upgraded replica by replica.

A body is what ``torch.distributed._serialization`` writes and reads: a pickled list of entries, then the records in
order, where a storage is its raw bytes. A sender serves the storages directly from memory. A receiver unpickles with
the same allow-list as for tensorferry's own format.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import pickletools
from collections.abc import Callable
from datetime import timedelta
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import _serialization
from torch.utils._pytree import tree_flatten

from .._native import HostView, HttpAnswer, _check_machine_has
from ..errors import ConnectError, FetchTimeout, ProtocolError, SourceRefused, TensorferryError, message_of
from ..memory.tensors import scratch
from ..pickles.allowlist import Allowed
from ..pickles.deadline import Deadline
from ..pickles.unpickler import pickle_module, unpickler_class

_PROTOCOL = 2
_READ = 1 << 20
#: After so many short reads the time is looked at.
_READS = 1 << 12
#: Bytes of the longest name of a class or function in a pickle.
_LINE = 1 << 16
_MOST = 2**63 - 1
#: The most characters of a refusal that a message repeats.
_MOST_SAID = 2000


class _BodyParts(list[Any]):
    """The parts of a body; ``keep`` keeps their memory alive."""

    keep: Any = None


class _RecordCollector:
    """Stands in for the file that ``torch.serialization`` writes, and collects the records instead."""

    def __init__(self) -> None:
        self.records: list[tuple[str, Any, int]] = []

    def write_record(self, key: str, data: Any, length: int) -> None:
        self.records.append((key, data, length))

    def serialization_id(self) -> str:
        return "tensorferry"


def body(value: Any) -> list[Any]:
    """Returns the parts of ``value`` in torchft's format: bytes, and ``(address, nbytes)`` for each storage."""
    recorder = _RecordCollector()
    torch.serialization._save(value, recorder, pickle, _PROTOCOL, False)
    storage = torch.UntypedStorage
    entries = [_serialization._Entry(key, isinstance(data, storage), size) for key, data, size in recorder.records]
    parts = _BodyParts([pickle.dumps(entries, protocol=_PROTOCOL)])
    for _, data, size in recorder.records:
        if isinstance(data, storage):
            parts.append((data.data_ptr() if size else 0, size))
        else:
            parts.append(data.encode() if isinstance(data, str) else bytes(data))
    parts.keep = recorder.records
    return parts


def bodies(state: Callable[[], Any], num_chunks: int) -> Callable[[str], list[Any] | None]:
    """Returns a function that renders the resources which a stock receiver may request.

    The function takes ``full``, ``metadata`` or the number of a chunk, and returns the parts of that body; for any
    other name it returns ``None``.

    Args:
        state: returns the state with all tensors on the host; what it returned once is kept
        num_chunks: the number of chunks over which the leaves are distributed
    """
    whole = functools.cache(state)
    leaves = functools.cache(lambda: tree_flatten(whole()))

    def render(name: str) -> list[Any] | None:
        if name == "full":
            return body(whole())
        values, spec = leaves()
        if name == "metadata":
            return body(spec)
        chunks = [values[i::num_chunks] for i in range(num_chunks)]
        try:
            return body(chunks[int(name)])
        except (IndexError, ValueError):
            return None

    return render


class _Reader(io.RawIOBase):
    """The body of an answer as a raw stream."""

    def __init__(self, answer: HttpAnswer) -> None:
        self._answer = answer

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # What is longer than the reader's own buffer has its place: a storage, which is received with one call.
        return self._answer.readinto(buffer, len(buffer) > _READ)


class _Exact(io.BufferedReader):
    """Reads exactly the requested number of bytes, or raises, because the format itself does not show a cut-off body.

    The source announces the sizes. Together they must not exceed this machine's memory; a line must not exceed the
    length of a name.
    """

    _announced = 0
    _reads = 0

    def __init__(self, raw: io.RawIOBase, given: float) -> None:
        """Reads ``raw``, for at most ``given`` seconds from now."""
        super().__init__(raw, _READ)
        self.deadline = Deadline(given)

    def readline(self, size: int | None = -1, /) -> bytes:
        del size
        line = super().readline(_LINE)
        if not line.endswith(b"\n"):
            raise ProtocolError(f"the source sent a name that is longer than {_LINE} bytes or cut off")
        return line

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads exactly ``size`` bytes, a number that the source has announced."""
        if size is None or size < 0:
            raise ProtocolError(f"the source announced a record of {size} bytes")
        self._announce(size)
        data = super().read(size)
        self._check_whole(size, len(data))
        return data

    def storage(self, size: int) -> torch.UntypedStorage:
        """Reads the next ``size`` bytes into a new storage that the user may write to.

        A storage over a ``bytes`` object would not do: Python shares ``bytes`` objects of length 1 process-wide.
        """
        self._announce(size)
        storage = scratch(size).untyped_storage()
        if size:
            view: Any = HostView(storage, storage.data_ptr(), size)
            self._check_whole(size, self.readinto(view))
        return storage

    def _announce(self, size: int) -> None:
        """Counts a size that the source has announced; checks the memory and, now and then, the deadline."""
        # The sum counts: the records together make up the state, and each one may be as long as the last.
        self._announced += size
        self._reads += 1
        if self._reads % _READS == 0:
            self.deadline.check()
        _check_machine_has(min(self._announced, _MOST), "what the source announced")

    def _check_whole(self, size: int, read: int) -> None:
        if read < size:
            raise ConnectError(f"the source closed the connection {size - read} bytes before the end of a record")


def _records(stream: _Exact) -> list[tuple[str, bool, int]]:
    """Reads the list at the head of a body: each record's name, whether it is a storage, and its length in bytes.

    Types are checked before a value is used at all, even in a message: instead of the list, a hostile source may send a
    tensor of a billion elements, and instead of a number a tuple whose text is endless.
    """
    listed = Allowed([_serialization._Entry]).until(stream.deadline)
    entries = unpickler_class(listed)(io.BytesIO(_pickled(stream))).load()
    if type(entries) is not list:
        raise ProtocolError("the source's list of records is not a list")
    records = []
    for number, entry in enumerate(entries):
        if number % _READS == 0:
            stream.deadline.check()
        fields = vars(entry) if type(entry) is _serialization._Entry else {}
        key, is_storage, length = fields.get("key"), fields.get("is_storage"), fields.get("length")
        if type(key) is not str or type(is_storage) is not bool or type(length) is not int or not 0 <= length <= _MOST:
            raise ProtocolError(f"record {number} that the source announced has no valid name, kind or length")
        records.append((key, is_storage, length))
    return records


#: For each pickle instruction, the length of its argument in bytes, or one of pickletools' negative constants.
_ARGUMENTS: dict[int, int] = {
    op.code.encode("latin-1")[0]: 0 if op.arg is None else op.arg.n for op in pickletools.opcodes
}
#: For pickletools' constants of counted arguments, the width of the count in bytes.
_COUNTED = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4,
            pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8}  # fmt: skip
_MOST_RECORDS = 1 << 28


def _pickled(stream: _Exact) -> bytes:
    """Reads the pickle at the head of a body up to its STOP instruction; its length is not announced."""
    found = bytearray()
    while True:
        op = stream.read(1)
        found += op
        count = _ARGUMENTS.get(op[0], 0)
        if op == b"c":
            found += stream.readline(1000) + stream.readline(1000)
        elif count < 0:
            if count not in _COUNTED:
                raise ProtocolError(f"the list of records has the unexpected instruction {op!r}")
            size = stream.read(_COUNTED[count])
            found += size
            count = int.from_bytes(size, "little")
        if len(found) + count > _MOST_RECORDS:
            raise ProtocolError(f"the list of records is longer than {_MOST_RECORDS} bytes")
        if count > 0:
            found += stream.read(count)
        if op == b".":
            return bytes(found)


def _load(stream: _Exact, allowed: Allowed) -> Any:
    """Reads a body: its records into memory, and then the value that its pickle describes over them."""
    file = _serialization._PseudoZipFile()
    # Not by its read_from: that builds tensors over bytes objects, and in torch 2.8 it fails on storages of 0 bytes
    # (pytorch#180481).
    for key, is_storage, length in _records(stream):
        file.records[key] = (stream.storage(length) if is_storage else stream.read(length), length)
    module = pickle_module(allowed.until(stream.deadline))
    if not allowed.trusts:
        module.Unpickler = _checking(module.Unpickler, file.records)
    return torch.serialization._load(file, "cpu", module, encoding="utf-8")


def _checking(unpickler: type[Any], records: dict[str, tuple[Any, int]]) -> type[Any]:
    """Returns a subclass of ``unpickler`` that checks references to ``records`` before torch sees them.

    torch itself would put an unknown reference into its message, however large it is.
    """

    class Checking(unpickler):  # type: ignore[misc]
        @property
        def persistent_load(self) -> Callable[[Any], Any]:
            return self._checked_load

        @persistent_load.setter
        def persistent_load(self, load: Callable[[Any], Any]) -> None:
            self._load_storage = load

        def _checked_load(self, pid: Any) -> Any:
            """Returns the storage to which ``pid`` refers, if the source has sent it."""
            if type(pid) is not tuple or len(pid) != 5:
                raise ProtocolError("the source's pickle refers to something that is not a storage")
            what, kind, key, location, count = pid
            is_record = (
                {type(what), type(key), type(location)} == {str}
                and what == "storage"
                and (kind is torch.UntypedStorage or type(kind) is torch.serialization.StorageType)
                and type(count) is int
                and 0 <= count <= _MOST
                and isinstance(records.get(f"data/{key}", (None, 0))[0], torch.UntypedStorage)
            )
            if not is_record:
                raise ProtocolError("the source's pickle refers to a storage that the source did not send")
            return self._load_storage(pid)

    return Checking


def _printable(said: str) -> str:
    """Returns what a source said, for a message: on one line, of bounded length, without escape sequences."""
    return "".join(c if c.isprintable() else " " for c in said[:_MOST_SAID])


def receive(metadata: str, step: int, timeout: timedelta, allowed: Allowed) -> Any:
    """Fetches a state from torchft's own transport.

    Args:
        metadata: the source's metadata
        step: the step to fetch
        timeout: the deadline for the whole receive
        allowed: the globals that the pickle may name

    Raises:
        FetchTimeout, ConnectError, SourceRefused, UnsafePickle, ProtocolError: as for tensorferry's own format
        SystemRefused: the source announced more than this machine has memory for
    """
    source = urlsplit(metadata).netloc
    try:
        with contextlib.closing(HttpAnswer.open(metadata, f"{step}/full", timeout=timeout.total_seconds())) as answer:
            if answer.status != HTTPStatus.OK:
                raise SourceRefused.of(answer.status, _printable(answer.reason))
            return _load(_Exact(_Reader(answer), timeout.total_seconds()), allowed)
    except FetchTimeout as e:
        # As it is, with the step that was asked for.
        raise type(e)(f"step {step} from {source}: {message_of(e)}") from e
    except TensorferryError:
        raise
    except Exception as e:
        raise ProtocolError(
            f"the answer of {source} for step {step} cannot be read ({type(e).__name__}: {e}); if the source failed to "
            "pickle its state, its log says why"
        ) from e
