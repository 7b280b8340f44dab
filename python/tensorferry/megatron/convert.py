"""Reads a checkpoint of Megatron, of any backend, and writes it as one of another, for ``tensorferry convert``.

One process does it, without a process group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .. import _validate
from ..dcp import FileReader, index
from ..dcp.file_writer import RankFile
from ..dcp.save_plan import ABOUT
from ..errors import InvalidArgument, TensorferryError
from ..pickles.allowlist import Allowed
from ..storage import commits, reserved
from ..storage.boxes import Box
from ..storage.commits import Commit
from ..storage.folder import INDEX
from ..storage.names import new_id
from ..storage.pending import pending
from ..storage.places import local_path
from . import common, shards
from .loading import Loading, common_in
from .release import COMMON, CheckpointingException, ShardedObject, ShardedTensor
from .save import BACKEND
from .save_plan import SaveData, metadata_of
from .zarr_folder import ZarrArray, arrays_of, load_object, objects_of

#: Bytes of tensors that are in memory at a time, unless one stored chunk has more.
WINDOW = 512 << 20
#: The common state among the objects of a checkpoint of backend ``torch_dist``, in releases since 0.19.
_COMMON_OBJECT = ShardedObject(COMMON, None, (1,), (0,)).unique_key
#: A stored chunk: the tensor's key, dtype and shape, the chunk, and what reads it.
Chunk: TypeAlias = tuple[str, torch.dtype, tuple[int, ...], Box, Callable[[], torch.Tensor]]


class Converted(NamedTuple):
    """What a conversion has done.

    Attributes:
        tensors: how many tensors were converted
        objects: how many objects
        bytes: the bytes of the tensors
    """

    tensors: int
    objects: int
    bytes: int


class Stored(NamedTuple):
    """A checkpoint that is read.

    Attributes:
        chunks: yields the chunks of its tensors
        objects: what reads the objects, by their unique keys
        common: the common state as ``torch.save`` wrote it; ``None`` if there is none
    """

    chunks: Callable[[], Iterator[Chunk]]
    objects: dict[str, Callable[[], Any]]
    common: bytes | None


def read_checkpoint(folder: Path, *, safe_globals: Iterable[Any] = (), trust_pickle: bool = False) -> Stored:
    """Opens a checkpoint of backend ``zarr``, ``torch_dist`` or ``tensorferry``, whose tensors are read later.

    Raises:
        CheckpointingException, TensorferryError: it is of another format, is damaged, or cannot be read
    """
    config = common.config(folder)
    if config.sharded_backend not in ("zarr", "torch_dist", BACKEND) or config.sharded_backend_version != 1:
        raise CheckpointingException(
            f"{folder} is of backend {config.sharded_backend!r}, version {config.sharded_backend_version!r}: "
            f"checkpoints of version 1 of zarr, torch_dist and {BACKEND} can be read"
        )
    if config.sharded_backend == "zarr":
        return _read_zarr(folder, Allowed(safe_globals, trust_pickle))
    reader = FileReader(folder, safe_globals=(*safe_globals, *_OF_EARLY_RELEASES), trust_pickle=trust_pickle)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, False)
    return _read_indexed(folder, reader, metadata, is_packed=config.sharded_backend == "torch_dist")


def write_checkpoint(stored: Stored, folder: Path, to: str) -> Converted:
    """Writes a checkpoint of backend ``to``, which is ``torch_dist`` or ``tensorferry``, into an empty folder.

    Raises:
        CheckpointingException, TensorferryError: it cannot be read or written
    """
    output = _TorchDistOutput(folder) if to == "torch_dist" else _FerryOutput(folder)
    keys: set[str] = set()
    total = held = 0
    data = SaveData()
    items: list[WriteItem] = []
    for key, dtype, shape, box, read in stored.chunks():
        nbytes = box.numel * dtype.itemsize
        if held and held + nbytes > WINDOW:
            output.write(items, data)
            held, items, data = 0, [], SaveData()
        items.append(data.add_tensor(key, box, shape, read()))
        held += nbytes
        total += nbytes
        keys.add(key)
    for key, value in stored.objects.items():
        items.append(data.add_object(key, output.packed(value())))
    output.write(items, data)
    if stored.common is not None:
        common.write(folder, stored.common)
    output.finish(stored.common)
    common.mark(folder, to, 1)
    return Converted(len(keys), len(stored.objects), total)


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    to: str = BACKEND,
    safe_globals: Iterable[Any] = (),
    trust_pickle: bool = False,
) -> Converted:
    """Converts the checkpoint in the folder ``source`` into a new folder ``output``, which appears when it is complete.

    Tensors keep their keys, shapes and dtypes; objects and the common state keep their values.

    Args:
        source: a checkpoint of backend ``zarr``, ``torch_dist`` or ``tensorferry``
        output: a folder that does not exist, or is empty
        to: the backend of the output: ``"tensorferry"`` or ``"torch_dist"``
        safe_globals: classes and functions that pickled objects may name besides the default list
        trust_pickle: read pickles without limits: whoever can write to ``source`` can then run code here

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
        CheckpointingException: ``source`` is incomplete, damaged or of another format, ``output`` exists, or the system
            refuses
    """
    if to not in (BACKEND, "torch_dist"):
        raise InvalidArgument(f"to must be {BACKEND} or torch_dist, not {_validate.brief(to)}")
    origin, target = local_path(source, "source"), local_path(output, "output")
    try:
        stored = read_checkpoint(origin, safe_globals=safe_globals, trust_pickle=trust_pickle)
        target.parent.mkdir(parents=True, exist_ok=True)
        with pending(target, folder=True) as folder:
            return write_checkpoint(stored, folder, to)
    except CheckpointingException:
        raise
    except InvalidArgument as e:
        # Of the output: it exists, or somebody else writes it.
        raise CheckpointingException(str(e)) from e
    except (TensorferryError, OSError) as e:
        raise CheckpointingException(f"{source} cannot be converted into {output}: {e}") from e


def _read_zarr(folder: Path, allowed: Allowed) -> Stored:
    arrays = list(arrays_of(folder))

    def reads(array: ZarrArray, box: Box) -> Callable[[], torch.Tensor]:
        return lambda: array.read(box)

    def chunks() -> Iterator[Chunk]:
        for array in arrays:
            for box in array.chunks:
                yield array.key, array.dtype, array.shape, box, reads(array, box)

    def loads(leaf: Any) -> Callable[[], Any]:
        return lambda: load_object(folder, leaf, allowed)

    return Stored(chunks, {key: loads(leaf) for key, leaf in objects_of(folder).items()}, common.read(folder))


def _read_indexed(folder: Path, reader: FileReader, metadata: Metadata, *, is_packed: bool) -> Stored:
    """Reads a checkpoint with an index; ``is_packed`` says that each object is in a list, as Megatron writes them."""
    known = metadata.state_dict_metadata

    def load(leaf: Any) -> Any:
        loading = Loading({"leaf": leaf}, metadata, reader, reserved=frozenset())
        loading.read([*loading.objects.values(), *loading.tensors])
        return loading.value(leaf)

    def reads(key: str, about: TensorStorageMetadata, box: Box) -> Callable[[], torch.Tensor]:
        dtype = about.properties.dtype
        return lambda: load(ShardedTensor(key, None, dtype, box.sizes, tuple(about.size), box.offsets, None))

    def chunks() -> Iterator[Chunk]:
        for key, about in known.items():
            if isinstance(about, TensorStorageMetadata) and key != COMMON:
                boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in about.chunks]
                shards.check_cover(key, tuple(about.size), boxes, "the files of the checkpoint")
                for box in boxes:
                    yield key, about.properties.dtype, tuple(about.size), box, reads(key, about, box)

    def loads(key: str) -> Callable[[], Any]:
        def value() -> Any:
            found = load(shards.object_of(key))
            if is_packed and (not isinstance(found, list) or len(found) != 1):
                raise CheckpointingException(f"{folder}: {key} is not an object that Megatron has saved")
            return found[0] if is_packed else found

        return value

    objects = {key: loads(key) for key, about in known.items() if not isinstance(about, TensorStorageMetadata)}
    shared = common_in(reader, metadata)
    if _COMMON_OBJECT in objects:
        shared = common.encoded(objects.pop(_COMMON_OBJECT)())
    return Stored(chunks, objects, common.read(folder) if shared is None else shared)


class _Output:
    """A checkpoint that is written, with as many files as calls of :meth:`write`.

    Args:
        folder: the folder
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plans: list[SavePlan] = []
        self._results: list[WriteResult] = []

    def packed(self, value: Any) -> bytes:
        """Returns the bytes of an object."""
        return common.encoded(value)

    def write(self, items: list[WriteItem], data: SaveData) -> None:
        """Writes items, with their data, into a file."""
        if items:
            self._results += self._write(SavePlan(items), data)
            self._plans.append(SavePlan(items))

    def _write(self, plan: SavePlan, data: SaveData) -> list[WriteResult]:
        raise NotImplementedError

    def finish(self, shared: bytes | None) -> None:
        """Writes the index; ``shared`` is the common state."""
        raise NotImplementedError


class _FerryOutput(_Output):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._id = new_id()

    def _write(self, plan: SavePlan, data: SaveData) -> list[WriteResult]:
        path = self._folder / f"rank{len(self._plans):05d}-{self._id}.safetensors"
        written, part = RankFile(path, None, None).write(plan, data)
        return part.results(written.bytes)

    def finish(self, shared: bytes | None) -> None:
        """Writes a copy of the common state into the checkpoint, as a save does, and the index."""
        if shared is not None:
            bare, data = torch.frombuffer(bytearray(shared), dtype=torch.uint8), SaveData()
            self.write([data.add_tensor(COMMON, Box((0,), tuple(bare.shape)), bare.shape, bare)], data)
        # Each file as if a rank had written it.
        parts = index.parts_of([result] for result in self._results)
        files = {part.container: part.header for part in parts if part.header is not None}
        entries = [(reserved.INDEX, index.encode(metadata_of(self._plans), parts, sorted(files)))]
        path = self._folder / INDEX
        commits.commit_index(path, entries, Commit(files, commits.begin_after([])), about=ABOUT)


class _TorchDistOutput(_Output):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._writer = FileSystemWriter(folder)
        self._writer.set_up_storage_writer(True)

    def packed(self, value: Any) -> bytes:
        """Returns the bytes of an object, which Megatron packs into a list."""
        return common.encoded([value])

    def _write(self, plan: SavePlan, data: SaveData) -> list[WriteResult]:
        plan = SavePlan(plan.items, storage_data=_StoragePrefix(f"__{len(self._plans)}_"))
        results: list[WriteResult] = self._writer.write_data(plan, data).wait()
        return results

    def finish(self, shared: bytes | None) -> None:
        """Writes the index; the common state is in ``common.pt``, which every release reads."""
        del shared
        metadata = metadata_of(self._plans)
        metadata.planner_data = {key: (key,) for key in metadata.state_dict_metadata}
        self._writer.finish(metadata, [self._results])


def _stand_in(name: str, base: type) -> type:
    """Returns a class for instances that a pickle says are of a class that releases until 0.15 had."""
    return type(name, (base,), {"__module__": "megatron.core.dist_checkpointing.strategies.torch"})


#: What the indexes of those releases name besides torch's metadata: it is read, and not used.
_OF_EARLY_RELEASES = (
    SavePlan,
    WriteItem,
    WriteItemType,
    TensorWriteData,
    _stand_in("MCoreMetadata", Metadata),
    _stand_in("MCoreSavePlan", SavePlan),
)
