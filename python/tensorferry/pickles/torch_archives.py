"""Reads what ``torch.save`` wrote, with the allow-list."""

from __future__ import annotations

import bisect
import contextlib
import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .._native import _check_machine_has
from ..errors import FetchTimeout, ProtocolError, SystemRefused, UnsafePickle
from .allowlist import Allowed, in_python_3
from .unpickler import pickle_module

#: Takes the offset of a record in its file and its length; returns a tensor over these bytes.
Mapped = Callable[[int, int], "torch.Tensor"]

#: The protocol of torch's pickles.
_PROTOCOL = 2
#: From so many bytes on, a record is longer than anything else in an archive but the pickle, and is not copied.
_LARGE = 4096
#: An instruction of a pickle that names a global.
_GLOBAL = re.compile(rb"c[^\n]+\n[^\n]+\n")

#: What every archive begins with.
_BEGIN = b"PK\x03\x04"
#: What is said of one that cannot be opened. Killed trainers leave such files: nobody is to be told to trust them.
_UNREADABLE = (
    "cannot be read: it is damaged or was cut off, or is no archive of torch.save (TorchScript, or the format that "
    "torch.save had before 1.6)"
)
#: What is said of an archive whose records are not all there, byte for byte.
_PACKED = "which torch.save never writes: unpack it and save the state again, or do not trust whoever made it"


class _Archive:
    """Torch's reader of ``torch.save`` archives, with checks of the lengths of records and storages."""

    def __init__(self, source: io.BytesIO | str, mapped: Mapped | None) -> None:
        self._reader = torch._C.PyTorchFileReader(source)
        #: Whether it is of an object, and not of TorchScript.
        self.is_object = self._reader.has_record("data.pkl") and not self._reader.has_record("constants.pkl")
        self._source = source
        self._mapped = mapped
        self._read = self._longest = 0

    def check_records(self) -> None:
        """Checks that all records together are no longer than the archive.

        So nothing that is read is longer than what is there: no record is compressed to less than its length, and none
        lies in another one.

        Raises:
            ProtocolError: they are longer, or one is compressed
            SystemRefused: this process cannot have memory for the pickle
        """
        known = getattr(self._reader, "get_record_size", None)
        if known is None or self._mapped is not None:
            # Some versions of torch have to unpack a record to say how long it is. Mapped records are taken as they lie
            # in the file, where those of an archive that was compressed by other tools are something else.
            self._check_listed()
        if known is not None:
            has = self._length()
            needs = sum(map(known, self._reader.get_all_records()))
            if needs > has:
                raise ProtocolError(
                    f"its records have {needs} bytes and the file {has}: they are compressed, {_PACKED}"
                )
            _check_machine_has(known("data.pkl"), "the pickle of an archive")

    def _length(self) -> int:
        return (
            self._source.getbuffer().nbytes
            if isinstance(self._source, io.BytesIO)
            else Path(self._source).stat().st_size
        )

    def _check_listed(self) -> None:
        """Checks the records by the archive's directory: none is compressed, and they fit into the file."""
        if isinstance(self._source, io.BytesIO):
            self._source.seek(0)
        with zipfile.ZipFile(self._source) as archive:
            records = archive.infolist()
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED:
                raise ProtocolError(f"its record {record.filename[:200]} is compressed, {_PACKED}")
        if sum(record.file_size for record in records) > self._length():
            raise ProtocolError(f"its records are longer than the file, {_PACKED}")
        self._longest = max((record.file_size for record in records), default=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def get_storage_from_record(self, name: str, nbytes: int, dtype: Any) -> Any:
        """Returns a tensor over a record, after checking its length.

        torch 2.8 takes the length from the pickle and would read beyond the record.

        Raises:
            ProtocolError: the record does not have ``nbytes`` bytes
            SystemRefused: this process cannot have memory for all that was read
        """
        has = self._size(name)
        if has != nbytes:
            raise ProtocolError(f"the record of a storage of {nbytes} bytes has {has} bytes")
        if self._mapped is not None:
            return self._mapped(self._reader.get_record_offset(name), nbytes)
        self._read += nbytes
        _check_machine_has(self._read, "what an archive holds")
        return self._reader.get_storage_from_record(name, nbytes, dtype)

    def _size(self, name: str) -> int:
        # Versions of torch without it read the record to say how long it is.
        known = getattr(self._reader, "get_record_size", None)
        if known is not None:
            return int(known(name))
        # Torch copies it once. No record is longer than the longest one that the directory tells of.
        _check_machine_has(2 * self._longest, "a record of an archive")
        return len(self._reader.get_record(name))


def unpickled(data: bytes, fqn: str, allowed: Allowed) -> Any:
    """Loads the object that ``torch.save`` has written as ``data``.

    Args:
        data: the archive
        fqn: the object's name, for messages
        allowed: the globals that its pickle may name

    Raises:
        UnsafePickle: the pickle asks for something that is not allowed, or ``torch.save`` does not write such data
        ProtocolError: the data is damaged; or ``torch.save`` does not write such, and everything is allowed
        SystemRefused: this process cannot have memory for what is in it
        FetchTimeout: the time that ``allowed`` gives for pickles is over
    """
    archive = _opened(io.BytesIO(data))
    if archive is not None and archive.is_object:
        return _load(archive, fqn, allowed, "cpu")
    if allowed.trusts or (archive is None and _BEGIN.startswith(data[: len(_BEGIN)])):
        raise ProtocolError(f"{fqn} {_UNREADABLE}")
    raise UnsafePickle(
        f"{fqn} is an object that torch.save did not write: pass trust_pickle=True to the reader if you trust the job "
        "that saved it"
    )


class SavedTensor:
    """What ``torch.save`` writes of a tensor; its elements stay where they are, if they are on the host.

    Args:
        tensor: the tensor

    Attributes:
        nbytes: how many bytes ``torch.save`` writes
        head: the first of them, with the pickle

    Raises:
        Exception: what pickling the tensor raises
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.nbytes = 0
        self.head = b""
        #: Where each part begins, its address and its length; what keeps their memory; and the storage that comes next.
        self._parts: list[tuple[int, int, int]] = []
        self._kept: list[Any] = []
        self._next: torch.UntypedStorage | None = None
        with torch.serialization._open_zipfile_writer(self) as file:
            torch.serialization._save(tensor, _Records(file, self), pickle, _PROTOCOL, False)

    def announce(self, storage: torch.UntypedStorage) -> None:
        """Takes a large storage whose bytes come next, behind what introduces them."""
        self._next = storage

    def write(self, data: memoryview) -> int:
        """Takes the next bytes of the archive, as its file."""
        memory: Any = self._next
        if memory is not None and len(data) == memory.nbytes():
            self._next = None
        else:
            memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if self.nbytes == len(self.head):
                self.head += data
        self._kept.append(memory)
        self._parts.append((self.nbytes, memory.data_ptr(), len(data)))
        self.nbytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Does nothing: torch calls it at the end."""

    def copies(self, begin: int, end: int, to: int) -> list[tuple[int, int, int]]:
        """Returns what copies the bytes from ``begin`` to ``end`` to the address ``to``.

        That is for each part of them, where it is, where it goes, and its length.
        """
        found = []
        for start, address, nbytes in self._parts[max(bisect.bisect(self._parts, (begin,)) - 1, 0) :]:
            if start >= end:
                break
            low, high = max(begin, start), min(end, start + nbytes)
            if low < high:
                found.append((address + low - start, to + low - begin, high - low))
        return found


class _Records:
    """The archive into which torch writes records; announces the large storages among them."""

    def __init__(self, file: Any, saved: SavedTensor) -> None:
        self._file, self._saved = file, saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write_record(self, name: str, data: Any, nbytes: int) -> None:
        if isinstance(data, torch.UntypedStorage) and nbytes >= _LARGE:
            self._saved.announce(data)
        self._file.write_record(name, data, nbytes)


def globals_of(data: bytes | bytearray) -> set[tuple[str, str]]:
    """Returns module and name of the globals that the pickle in ``data``, which ``torch.save`` wrote, names.

    Those of an object that was pickled by another protocol than torch's own, 2, are not found.
    """
    if data[:4] != _BEGIN:
        return set()
    # The pickle is the first record, stored as it is, and a descriptor follows it.
    name, extra = int.from_bytes(data[26:28], "little"), int.from_bytes(data[28:30], "little")
    start = 30 + name + extra
    end = data.find(b".PK\x07\x08", start)
    if end < 0 or not _GLOBAL.search(data, start, end):
        return set()
    found = set()
    # An error means that it was cut short by a text that looks like its end.
    with contextlib.suppress(ValueError):
        for operation, argument, _ in pickletools.genops(bytes(data[start : end + 1])):
            if operation.name == "GLOBAL":
                module, _, qualified = str(argument).partition(" ")
                # Readers take the class of a storage for the name of its dtype.
                if not (module in ("torch", "torch.storage") and qualified.endswith("Storage")):
                    found.add(in_python_3(module, qualified))
    return found


def load_file(
    path: Path,
    allowed: Allowed,
    map_location: Any = None,
    mapped: Mapped | None = None,
    name: str | None = None,
) -> Any:
    """Loads the object that ``torch.save`` has written to the file ``path``.

    Args:
        path: the file
        allowed: the globals that its pickle may name
        map_location: where its storages go, as ``torch.load`` has it
        mapped: returns the bytes of storages, which then are not read into memory of their own
        name: what messages call the file; ``None`` means its path

    Raises:
        UnsafePickle: the pickle asks for something that is not allowed
        ProtocolError: the file is damaged, or ``torch.save`` did not write it
        SystemRefused: the file cannot be opened, or this process cannot have memory for what is in it
    """
    try:
        with path.open("rb"):
            pass
    except OSError as e:
        raise SystemRefused(e.errno, f"{path}: cannot be read: {e.strerror}") from e
    archive = _opened(str(path), mapped)
    if archive is None or not archive.is_object:
        raise ProtocolError(f"{name or path} {_UNREADABLE}")
    return _load(archive, name or str(path), allowed, map_location)


def _opened(source: io.BytesIO | str, mapped: Mapped | None = None) -> _Archive | None:
    """Returns an archive, ``None`` if torch cannot open it."""
    try:
        return _Archive(source, mapped)
    except Exception:  # A malformed archive can raise anything.
        return None


def _load(archive: _Archive, name: str, allowed: Allowed, map_location: Any) -> Any:
    """Loads the object in an archive whose records are checked; ``name`` is the archive's in messages."""
    module = pickle_module(allowed, lambda _: name)
    try:
        archive.check_records()
        # This is what torch.load does with an archive of torch.save. torch.load itself would determine the kind of
        # archive once more, and it runs the code of a TorchScript archive. Only one reader may search the archive for
        # its directory: two readers may find different ones.
        return torch.serialization._load(archive, map_location, module, encoding="utf-8")
    except (UnsafePickle, SystemRefused, FetchTimeout):
        raise
    except Exception as e:
        raise ProtocolError(f"{name} cannot be read ({type(e).__name__}: {e})") from e
    finally:
        # torch clears this only after a load that succeeded. With what is left of a failed one, no DTensor can be
        # unpickled in this thread any more.
        torch.serialization._serialization_tls.map_location = None
