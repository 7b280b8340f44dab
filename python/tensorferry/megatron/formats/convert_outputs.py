"""The formats that ``convert.py`` writes: ``tensorferry`` and ``torch_dist``, into a folder that is committed later."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ...dcp import index
from ...dcp.file_writer import RankFile
from ...dcp.index import EntryRef
from ...dcp.save_plan import ABOUT
from ...storage import commits, reserved
from ...storage.boxes import Box
from ...storage.commits import Commit
from ...storage.folder import INDEX
from ...storage.names import new_id
from .. import common
from ..release import COMMON

#: A tensor's key, the part of it that is written, and that part.
Filled = tuple[str, Box, torch.Tensor]


class _Indexed:
    """What both outputs share: the index.

    Args:
        folder: the folder
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = 0
        self._metadata = Metadata({})
        self._stored: dict[MetadataIndex, Any] = {}

    def add_tensor(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Announces a tensor."""
        about = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        self._metadata.state_dict_metadata[key] = about

    def _add_part(self, key: str, box: Box) -> tuple[MetadataIndex, ChunkStorageMetadata]:
        chunk = ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
        self._metadata.state_dict_metadata[key].chunks.append(chunk)
        return MetadataIndex(key, chunk.offsets), chunk

    def _number(self) -> int:
        self._files += 1
        return self._files - 1


class _PlannedBatch:
    """The data of a plan: torch's planner, as far as the writer of a rank's file calls it."""

    def __init__(self) -> None:
        self._values: dict[MetadataIndex, Any] = {}
        self.items: list[WriteItem] = []

    def add(self, item: WriteItem, value: Any) -> None:
        """Adds an item and its data."""
        self.items.append(item)
        self._values[item.index] = value

    def resolve_data(self, item: WriteItem) -> Any:
        """Returns the data of an item."""
        return self._values[item.index]


class FerryOutput(_Indexed):
    """A checkpoint of backend ``tensorferry``, with as many files as batches."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._id = new_id()
        self._commit: dict[str, int | None] = {}

    def write(self, batch: list[Filled]) -> None:
        """Writes parts of tensors into a file."""
        planned = _PlannedBatch()
        for key, box, data in batch:
            at, chunk = self._add_part(key, box)
            about = self._metadata.state_dict_metadata[key]
            item = WriteItem(
                index=at,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=about.properties, size=about.size),
            )
            planned.add(item, data)
        self._write(planned)

    def write_objects(self, objects: Iterable[tuple[str, Any]]) -> None:
        """Writes objects into a file."""
        planned = _PlannedBatch()
        for name, value in objects:
            self._metadata.state_dict_metadata[name] = BytesStorageMetadata()
            item = WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
            planned.add(item, io.BytesIO(common.encoded(value)))
        self._write(planned)

    def _write(self, planned: _PlannedBatch) -> None:
        """Writes a batch into a new file, and notes where its items are."""
        if not planned.items:
            return
        path = self._folder / f"rank{self._number():05d}-{self._id}.safetensors"
        written, results = RankFile(path, None, None).write(SavePlan(planned.items), planned)
        self._commit[path.name] = written.header
        self._stored.update({result.index: result.storage_data for result in results})

    def finish(self, shared: bytes | None) -> None:
        """Writes a copy of the common state into the checkpoint, as a save does, and the index."""
        if shared is not None:
            bare = torch.frombuffer(bytearray(shared), dtype=torch.uint8)
            self.add_tensor(COMMON, bare.dtype, tuple(bare.shape))
            self.write([(COMMON, Box((0,), tuple(bare.shape)), bare)])
        stored: dict[MetadataIndex, EntryRef] = self._stored
        path = self._folder / INDEX
        entries = [(reserved.INDEX, index.encode(self._metadata, stored))]
        began = commits.begin_after(commits.beginnings(path))
        commits.commit_index(path, entries, Commit(self._commit, began), about=ABOUT)


class _Pickling:
    """The ``pickle_module`` with which ``torch.save`` keeps nothing of what it has written."""

    class Pickler(pickle.Pickler):
        """A pickler from which each call of ``torch.save`` derives a class."""

        def dump(self, obj: Any) -> None:
            """Pickles an object."""
            super().dump(obj)
            # A class refers to itself, so it stays until the garbage collector runs: in torch 2.8, with this method of
            # it, which refers to the storages.
            derived = type(self)
            if "persistent_id" in vars(derived):
                del derived.persistent_id


class TorchDistOutput(_Indexed):
    """A checkpoint of backend ``torch_dist``, as torch's writer writes it, with as many files as batches."""

    def write(self, batch: list[Filled]) -> None:
        """Writes parts of tensors into a file."""
        self._write([(self._add_part(key, box)[0], data) for key, box, data in batch])

    def write_objects(self, objects: Iterable[tuple[str, Any]]) -> None:
        """Writes objects into a file, each in a list of its own, as Megatron does."""

        def items() -> Iterable[tuple[MetadataIndex, Any]]:
            for name, value in objects:
                self._metadata.state_dict_metadata[name] = BytesStorageMetadata()
                yield MetadataIndex(name), [value]

        self._write(items())

    def _write(self, values: Iterable[tuple[MetadataIndex, Any]]) -> None:
        """Writes values into a new file, each by ``torch.save``, and notes where they are."""
        name = f"__{self._number()}_0.distcp"
        with (self._folder / name).open("wb") as file:
            for at, value in values:
                start = file.tell()
                torch.save(value, file, pickle_module=_Pickling)
                self._stored[at] = _StorageInfo(name, start, file.tell() - start)
            file.flush()
            os.fsync(file.fileno())

    def finish(self, shared: bytes | None) -> None:
        """Writes the index; the common state is in ``common.pt``, which every release reads."""
        del shared
        self._metadata.planner_data = {key: (key,) for key in self._metadata.state_dict_metadata}
        self._metadata.storage_data = self._stored
        with (self._folder / ".metadata").open("wb") as file:
            pickle.dump(self._metadata, file)
            file.flush()
            os.fsync(file.fileno())


#: The outputs by the backend that ``metadata.json`` will name.
OUTPUTS: dict[str, type[FerryOutput] | type[TorchDistOutput]] = {
    "tensorferry": FerryOutput,
    "torch_dist": TorchDistOutput,
}
