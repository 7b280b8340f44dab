"""Presents a publication as a folder that torch's own readers can load: ``.metadata``, and files for each rank.

A file is a sequence of what ``torch.save`` writes. The elements of tensors are served from where they are. The bytes
before and behind the elements depend only on dtype and shape, so that the coordinator can compute the lengths of the
files of all ranks.

torch reads such a folder by fsspec, which asks for 5 MiB more than it needs after every jump, and for many bytes twice
if it reads on through a long file. Therefore a file has at most that length, unless it holds a single tensor; its
tensors are in the order in which torch asks for them; and they are written in torch's older format, which
``torch.load`` reads from the beginning to the end. It reads the newer one, a zip archive, from the end.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import os
import pickle
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from ..errors import ProtocolError
from ..pickles.allowlist import Allowed
from ..storage.peers import url_of
from . import index
from .index import ELEMENTS, EntryRef
from .save_plan import Elements, PlanSnapshot

#: What fsspec reads ahead, and reads at once of a file that is not longer.
_FILE_BYTES = 5 << 20
#: The storage classes by which torch's older format names dtypes. Others have none there.
_STORAGES = {
    torch.bfloat16: torch.BFloat16Storage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.float16: torch.HalfStorage,
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.int16: torch.ShortStorage,
    torch.int32: torch.IntStorage,
    torch.int64: torch.LongStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
}


def in_reading_order(plan: SavePlan) -> SavePlan:
    """Returns ``plan`` with its items in the order in which ``torch.distributed.checkpoint.load`` asks for them."""
    paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}

    def key(item: Any) -> str:
        return str((paths.get(item.index.fqn) or (item.index.fqn,))[0])

    return dataclasses.replace(plan, items=sorted(plan.items, key=key))


#: The text of the index, and the entries of all ranks, those of one rank in the order of its rows.
Index: TypeAlias = tuple[bytes, list[tuple[MetadataIndex, EntryRef]]]


def _files(rank: int, lengths: Iterable[int]) -> Iterator[tuple[str, int]]:
    """Yields for each entry of a rank the name of the file that holds it, and where it begins in that file."""
    number = end = 0
    for length in lengths:
        if end and end + length > _FILE_BYTES:
            number, end = number + 1, 0
        yield f"__{rank}_{number}.distcp", end
        end += length


class TorchView:
    """Renders the files of the folder on request.

    Args:
        snapshot: this rank's entries
        step: the step of the publication
        url: this rank's URL
        urls: the URLs of all ranks, the coordinator's first
        index: on the coordinator, the index and the entries of all ranks; ``None`` on the other ranks
    """

    def __init__(self, snapshot: PlanSnapshot, step: int, url: str, urls: list[str], index: Index | None) -> None:
        self._snapshot = snapshot
        self._folder = f"{step}/dcp/"
        self._url = url
        self._urls = urls
        self._index = index

    def __call__(self, name: str) -> list[Any] | str | None:
        """Renders a file of the folder, or with an empty name the list of its files, as HTML.

        Returns:
            The parts of the file: bytes, or address and length of memory. The URL where it is for a file of another
            rank, on the coordinator, and for the list on other ranks. ``None`` if there is no such file.

        Raises:
            ProtocolError: the planner has written items that its metadata does not describe
        """
        file = name.removeprefix("dcp/")
        if file in self._own_rows:
            return self._parts(self._own_rows[file])
        if self._index is None:
            return None if file else f"{self._urls[0]}{self._folder}"
        if not file:
            return [self._listing()]
        metadata, urls = self._global_index
        if file == ".metadata":
            return [pickle.dumps(metadata)]
        return f"{urls[file]}{self._folder}{file}" if file in urls else None

    def _listing(self) -> bytes:
        """Returns the page by which fsspec lists a folder: any page with links to its files."""
        links = "".join(f'<li><a href="{name}">{name}</a></li>\n' for name in (".metadata", *self._global_index[1]))
        return f"<!DOCTYPE html>\n<title>checkpoint</title>\n<ul>\n{links}</ul>\n".encode()

    def _parts(self, of_file: list[int]) -> list[Any]:
        """Returns the parts of a file's body: bytes, and ``(address, nbytes)`` for the memory of each of its rows."""
        rows, sizes = self._snapshot.rows, self._snapshot.rows.sizes
        parts: list[Any] = []
        for row in of_file:
            elements = self._snapshot.elements[row]
            before, behind = _around(*elements) if elements else (b"", b"")
            parts += [before, (rows.address(row) if sizes[row] else 0, sizes[row]), behind]
        return parts

    @functools.cached_property
    def _own_rows(self) -> dict[str, list[int]]:
        """The rows of each file of this rank."""
        snapshot = self._snapshot
        lengths = (_length(*entry) for entry in zip(snapshot.elements, snapshot.rows.sizes, strict=True))
        found = defaultdict(list)
        for row, (name, _) in enumerate(_files(self._urls.index(self._url), lengths)):
            found[name].append(row)
        return dict(found)

    @functools.cached_property
    def _global_index(self) -> tuple[Metadata, dict[str, str]]:
        """Torch's index, and the URL of the rank that has each file it names."""
        assert self._index is not None
        text, entries = self._index
        metadata = index.decode(text, "the publication", Allowed((), trust=True))
        if len(metadata.storage_data) != len(entries):
            raise ProtocolError(
                "the planner has written items that its metadata does not describe, so torch cannot find them by name"
            )
        shapes = {
            (fqn, chunk.offsets): (stored.properties.dtype, tuple(chunk.sizes))
            for fqn, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
            for chunk in stored.chunks
        }
        lengths = defaultdict(list)
        keys = defaultdict(list)
        for key, ref in entries:
            elements = shapes[key.fqn, key.offset] if ref.kind == ELEMENTS else None
            url = url_of(ref.container)
            lengths[url].append(_length(elements, ref.nbytes))
            keys[url].append(key)
        metadata.storage_data, urls = {}, {}
        for rank, url in enumerate(self._urls):
            places = _files(rank, lengths[url])
            for key, length, (name, start) in zip(keys[url], lengths[url], places, strict=True):
                metadata.storage_data[key] = _StorageInfo(name, start, length)
                urls[name] = url
        return metadata, urls


def _length(elements: Elements | None, nbytes: int) -> int:
    """Returns how long an entry of ``nbytes`` bytes is in a file; ``elements`` as in :class:`PlanSnapshot`."""
    return nbytes + (sum(map(len, _around(*elements))) if elements else 0)


class _BytesAroundElements:
    """Stands in for the file that ``torch.save`` writes; keeps all bytes except the elements, which torch skips."""

    def __init__(self) -> None:
        self.parts = [io.BytesIO()]

    def write(self, data: Any) -> int:
        return self.parts[-1].write(data)

    def seek(self, offset: int, whence: int) -> None:
        assert (whence, len(self.parts)) == (os.SEEK_CUR, 1), "torch.save passes over one storage"
        del offset
        self.parts.append(io.BytesIO())

    def flush(self) -> None:
        pass


class _Storage:
    """Stands for the storage of a tensor that is pickled without it."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        self.described = ("storage", _STORAGES[dtype], "0", "cpu", count, None)


class _Tensor:
    """Pickles as a contiguous tensor."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        meta = torch.empty(shape, dtype=dtype, device="meta")
        hooks: OrderedDict[int, Any] = OrderedDict()
        self._made = (_Storage(dtype, meta.numel()), 0, shape, meta.stride(), False, hooks)

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self._made


class _StoragePickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.described if isinstance(obj, _Storage) else None


@functools.lru_cache(maxsize=4096)
def _around(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Returns the bytes before and behind the elements of a tensor in a file that ``torch.load`` reads."""
    return (_before(dtype, shape), b"") if dtype in _STORAGES else _around_in_archive(dtype, shape)


def elements(data: bytes, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor | None:
    """Returns the tensor that a downloaded file of a :class:`TorchView` holds in ``data``.

    Its bytes are compared with those that a view writes, so nothing is unpickled.

    Returns:
        The tensor, or ``None`` if ``data`` is not what a view writes for ``dtype`` and ``shape`` in torch's older
        format.
    """
    shape = tuple(shape)
    if dtype not in _STORAGES:
        return None
    before = _before(dtype, shape)
    if not data.startswith(before) or len(data) != len(before) + math.prod(shape) * dtype.itemsize:
        return None
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data[len(before) :]), dtype=torch.uint8).view(dtype).view(shape)


def _before(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Returns the bytes before the elements of a tensor in torch's older format, which has none behind them."""
    file = io.BytesIO()
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": PROTOCOL_VERSION, "little_endian": True, "type_sizes": sizes}
    for part in (MAGIC_NUMBER, PROTOCOL_VERSION, system, _Tensor(dtype, shape), ["0"]):
        _StoragePickler(file, 2).dump(part)
    file.write(struct.pack("<q", math.prod(shape)))
    return file.getvalue()


def _around_in_archive(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Returns the bytes that ``torch.save`` writes before and behind the elements of a tensor, in its zip format."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    recorder = _BytesAroundElements()
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), recorder)
    before, *behind = (part.getvalue() for part in recorder.parts)
    return before, behind[0] if behind else b""
