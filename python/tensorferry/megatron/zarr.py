"""Checkpoints of backend ``zarr``, which megatron-core had until 0.15: one Zarr array for each tensor.

``common.pt`` holds the common state and ``KEY/shard_OFFSET_SHAPE.pt`` the objects, as ``torch.save`` writes them.
``zarr_arrays.py`` has the format of the arrays.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .. import _validate
from ..errors import TensorferryError
from ..memory.tensors import scratch, why_not_writable
from ..pickles.allowlist import Allowed
from ..pickles.torch_archives import unpickled
from ..storage.whole_files import sync_folder, write_whole
from . import common, shards
from .formats.zarr_arrays import ARRAY, DTYPES, Piece, ZarrArray, new_path_of, open_array, path_of
from .interfaces import LoadShardedStrategy, SaveShardedStrategy
from .release import (
    COMMON,
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    TorchDistSaveShardedStrategy,
    is_main_replica,
)
from .together import Together

logger = logging.getLogger("tensorferry")

BACKEND, VERSION = "zarr", 1


class ZarrLoadShardedStrategy(LoadShardedStrategy):
    """Loads checkpoints of backend ``zarr``, for ``dist_checkpointing.load(..., sharded_strategy=)``.

    Each rank reads the parts of the arrays that its shards are, several chunks at a time, directly into the ``data`` of
    its ``ShardedTensor`` leaves where that lies in host memory and has the array's dtype.

    Args:
        threads: threads that read; ``None`` chooses by the number of cores
        safe_globals: classes and functions that pickled objects may name besides the default list
        trust_pickle: read pickles without limits: whoever can write to the folder can then run code here
        process_group: the ranks that load together; ``None`` means all

    Attributes:
        report: of the last load on this rank, the ``bytes`` that were read, and how many chunks were missing and
            ``filled`` with their array's fill value

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        self._threads = thread_count(threads)
        self._allowed = Allowed(safe_globals, trust_pickle)
        self._group = process_group
        self._on_device = False
        self.report = {"bytes": 0, "filled": 0}

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Always true."""
        return True

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Checks the backend of a checkpoint; the name of the argument is Megatron's.

        Raises:
            CheckpointingException: it is not ``zarr``
        """
        if loaded_version != BACKEND:
            raise CheckpointingException(
                f"the checkpoint is of backend {loaded_version!r}, and this strategy reads {BACKEND!r}: load it "
                "without sharded_strategy=, or with tensorferry's load_strategy() if it is of backend 'tensorferry'"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Checks the version of a checkpoint's format.

        Raises:
            CheckpointingException: it is not 1, the only one there was
        """
        if loaded_version != VERSION:
            raise CheckpointingException(
                f"the checkpoint has version {loaded_version!r} of the format {BACKEND!r}, of which there was only "
                f"version {VERSION}: load another checkpoint"
            )

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path, async_strategy: str | None = None) -> Any:
        """Loads the state, into the data of its tensors where they have some. All ranks call it.

        Args:
            sharded_state_dict: dicts and lists of ``ShardedTensor`` and ``ShardedObject``
            checkpoint_dir: the folder
            async_strategy: not used

        Returns:
            The same dicts and lists with tensors and values in place of the leaves.

        Raises:
            CheckpointingException: a key is not in the checkpoint or has another shape, an object may not be unpickled,
                or something is missing, damaged or cannot be read; it is raised on all ranks
        """
        del async_strategy
        folder, ranks = Path(checkpoint_dir), Together(self._group)
        values: dict[int, Any] = {}
        parts: list[_Part] = []

        def check() -> None:
            self._check_folder(folder)
            self._open(folder, sharded_state_dict, values, parts)

        # First on all ranks, before a byte of anyone's tensors is overwritten.
        with ranks.counting_on_each_other():
            ranks.every(f"load {folder}", check)
            ranks.every(f"load {folder}", lambda: self._read(folder, values, parts))
        return shards.replaced(sharded_state_dict, lambda leaf: values[id(leaf)])

    def _check_folder(self, folder: Path) -> None:
        config = common.config(folder)
        self.check_backend_compatibility(config.sharded_backend)
        self.check_version_compatibility(config.sharded_backend_version)

    def _open(self, folder: Path, state: Any, values: dict[int, Any], parts: list[_Part]) -> None:
        """Opens what this rank reads: adds objects to ``values``, by the ``id`` of the leaf, and tensors to ``parts``.

        That the chunks are there is checked before memory is allocated for a shape that only the metadata claims.
        """
        arrays: dict[str, ZarrArray] = {}
        for _, leaf in shards.leaves(state):
            if isinstance(leaf, ShardedObject):
                values[id(leaf)] = load_object(folder, leaf, self._allowed)
                continue
            if leaf.key not in arrays:
                arrays[leaf.key] = open_array(folder, leaf.key)
            parts.append(_Part(leaf, arrays[leaf.key]))
        with ThreadPoolExecutor(self._threads, "tensorferry-zarr") as pool:
            _all(pool, lambda job: job[0].array.check_chunk(job[1].chunk), _pieces(parts))

    def _read(self, folder: Path, values: dict[int, Any], parts: list[_Part]) -> None:
        """Reads ``parts``, and adds their tensors to ``values``."""
        for part in parts:
            values[id(part.shard)] = part.allocate(self._on_device)
        with ThreadPoolExecutor(self._threads, "tensorferry-zarr") as pool:
            read = _all(pool, lambda job: job[0].read(job[1]), _pieces(parts))
        filled = [part.array.key for (part, _), count in zip(_pieces(parts), read, strict=True) if not count]
        if filled:
            logger.warning(
                "%s: %d chunks are missing and were taken to hold the fill value of their array: %s",
                folder,
                len(filled),
                ", ".join(sorted(set(filled))[:10]),
            )
        self.report = {"bytes": sum(read), "filled": len(filled)}

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Returns the tensors of a checkpoint by key, as ``ShardedTensor`` without data and without shards.

        Raises:
            CheckpointingException: the checkpoint cannot be read
        """
        self._check_folder(Path(checkpoint_dir))
        return {array.key: _whole(array) for array in arrays_of(Path(checkpoint_dir))}

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Like :meth:`load_tensors_metadata`, with the checkpoint's objects by their unique keys.

        Raises:
            CheckpointingException: the checkpoint cannot be read
        """
        tensors = self.load_tensors_metadata(checkpoint_dir)
        return {**{leaf.unique_key: leaf for leaf, _ in objects_of(Path(checkpoint_dir))}, **tensors}


class TensorStoreLoadShardedStrategy(ZarrLoadShardedStrategy):
    """Loads checkpoints of backend ``zarr``; the default of those releases, which read with the tensorstore package.

    Args:
        load_directly_on_device: load into ``data`` on an accelerator, too; without it, tensors on accelerators stay as
            they are, and what is returned in their place lies in host memory, as in those releases
        threads, safe_globals, trust_pickle, process_group: as for :class:`ZarrLoadShardedStrategy`

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self,
        load_directly_on_device: bool = False,
        *,
        threads: int | None = None,
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            threads=threads, safe_globals=safe_globals, trust_pickle=trust_pickle, process_group=process_group
        )
        self.load_directly_on_device = _validate.boolean("load_directly_on_device", load_directly_on_device)
        self._on_device = load_directly_on_device


class ZarrSaveShardedStrategy(TorchDistSaveShardedStrategy, SaveShardedStrategy):  # type: ignore[misc]
    """Saves checkpoints of backend ``zarr``, which megatron-core 0.3 to 0.15 reads.

    A shard becomes a chunk. Like those releases, it does not save into an array that is there already; unlike them, it
    saves shards of uneven sizes, too. It derives from Megatron's own strategy because releases since 0.17 silently
    replace every other class.

    Args:
        backend: ``"zarr"``
        version: 1
        threads: threads that write; ``None`` chooses by the number of cores
        process_group: the ranks that save together; ``None`` means all

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
        CheckpointingException: ``backend`` or ``version`` is another one
    """

    def __init__(
        self, backend: str = BACKEND, version: int = VERSION, *, threads: int | None = None, process_group: Any = None
    ) -> None:
        if (backend, version) != (BACKEND, VERSION):
            raise CheckpointingException(
                f"ZarrSaveShardedStrategy writes the backend {BACKEND!r} of version {VERSION}, not {backend!r} of "
                f"version {version!r}"
            )
        TorchDistSaveShardedStrategy.__init__(self, backend, version)
        self._threads = thread_count(threads)
        self._group = process_group

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Always true."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Saves the shards and objects that this rank is the main replica of. All ranks call it.

        Raises:
            CheckpointingException: a shard has no data, or a dtype or shape that those releases cannot read, an array
                is there already, or the system refuses; it is raised on all ranks
        """
        folder = Path(checkpoint_dir)
        ranks = Together(self._group)
        tensors: list[Any] = []
        objects: list[Any] = []

        def create() -> None:
            for _, leaf in shards.leaves(sharded_state_dict):
                if isinstance(leaf, ShardedTensor):
                    shards.check(leaf)
                if is_main_replica(leaf.replica_id):
                    (objects if isinstance(leaf, ShardedObject) else tensors).append(leaf)
            for shard in tensors:
                _check_saved(shard)
                if not any(shard.global_offset) and (shards.box_of(shard).numel or not all(shard.global_shape)):
                    _array_for(folder, shard).create()

        def write() -> None:
            for leaf in objects:
                _save_object(folder, leaf)
            jobs = []
            arrays = {shard.key: open_array(folder, shard.key) for shard in tensors}
            for shard in tensors:
                array = arrays[shard.key]
                if (array.shape, array.dtype) != (tuple(shard.global_shape), shard.dtype):
                    raise CheckpointingException(
                        f"{shard.key}: the ranks do not agree on it: it is {shard.dtype} {list(shard.global_shape)} on "
                        f"this one, and {array.dtype} {list(array.shape)} on another one"
                    )
                data, box = shards.with_axes(shard), shards.box_of(shard)
                jobs += [(array, piece, piece.of(data)) for piece in array.pieces(*box)]
            with ThreadPoolExecutor(self._threads, "tensorferry-zarr") as pool:
                _all(pool, lambda job: job[0].write(*job[1:]), jobs)
            for path in {folder, *(array.path for array in arrays.values())}:
                sync_folder(path)

        with ranks.counting_on_each_other():
            ranks.every(f"save into {folder}", create)
            ranks.every(f"save into {folder}", write)

    def async_save(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: those releases saved this format synchronously only, and so does this strategy.

        Raises:
            CheckpointingException: always
        """
        del args, kwargs
        raise CheckpointingException(
            "Cannot apply async_save to the backend 'zarr': save without async_sharded_save=True, or with "
            "tensorferry's save_strategy()"
        )


class _Part:
    """A leaf that is loaded.

    Args:
        shard: the leaf
        array: the array that it is a part of

    Attributes:
        pieces: the parts of it that lie in one chunk each

    Raises:
        CheckpointingException: the leaf does not fit the array, or cannot be written to
    """

    def __init__(self, shard: Any, array: ZarrArray) -> None:
        shards.check(shard)
        box, asked = shards.box_of(shard), tuple(shard.global_shape)
        if len(asked) != len(array.shape) or (asked != array.shape and not shard.allow_shape_mismatch):
            raise CheckpointingException(
                f"Global shape mismatch for loaded ({array.shape}) and expected ({asked}) tensor for key {shard.key}: "
                "build the model that was saved, or mark a padded tensor with allow_shape_mismatch=True"
            )
        if shard.data is not None and (why := why_not_writable(shard.data.detach())) is not None:
            raise CheckpointingException(f"{shard.key}: its data cannot be written to: {why}")
        self.shard, self.array = shard, array
        self._there = [max(0, min(n, dim - a)) for a, n, dim in zip(*box, array.shape, strict=True)]
        self.pieces = list(array.pieces(box.offsets, self._there))
        self._target = torch.empty(0)

    def allocate(self, on_device: bool) -> torch.Tensor:
        """Returns the tensor that is read to, after zeroing what the array does not have.

        Args:
            on_device: whether that is the leaf's data if it lies on an accelerator, too
        """
        shard, target = self.shard, self.shard.data
        if target is None or (target.device.type != "cpu" and not on_device):
            nbytes = math.prod(shard.local_shape) * shard.dtype.itemsize
            target = scratch(nbytes).view(shard.dtype).view(tuple(shard.local_shape))
        if shard.data is None:
            shard.data = target
        target = target.detach()
        whole = target[(None,) * shard.prepend_axis_num]
        _zero_beyond(whole, self._there)
        self._target = whole[tuple(slice(0, n) for n in self._there)]
        return target

    def read(self, piece: Piece) -> int:
        """Reads a piece; returns how many bytes that took, 0 if its chunk is missing."""
        return self.array.read(piece, piece.of(self._target))


def _zero_beyond(target: torch.Tensor, sizes: Sequence[int]) -> None:
    """Sets all elements to 0 but those of the box of ``sizes`` at the beginning of ``target``."""
    for dim, n in enumerate(sizes):
        target.narrow(dim, n, target.shape[dim] - n).zero_()
        target = target.narrow(dim, 0, n)


def pad_to_expected_shape(x: torch.Tensor, expected_sharded_ten: Any) -> torch.Tensor:
    """Returns ``x`` with zeros behind it in each dimension, up to the shape of a shard.

    Loads do the same in place, for shards with ``allow_shape_mismatch``.

    Args:
        x: what the checkpoint has of the shard
        expected_sharded_ten: the ``ShardedTensor``

    Raises:
        CheckpointingException: ``x`` has another number of dimensions, or is larger
    """
    shape = tuple(expected_sharded_ten.local_shape)
    if x.dim() != len(shape) or any(n > m for n, m in zip(x.shape, shape, strict=True)):
        raise CheckpointingException(
            f"Expected shape {shape} smaller than actual {tuple(x.shape)} for {expected_sharded_ten.key}: it cannot be "
            "padded"
        )
    padded = x.new_empty(shape)
    padded[tuple(slice(0, n) for n in x.shape)] = x
    _zero_beyond(padded, x.shape)
    return padded


def thread_count(threads: int | None) -> int:
    """Returns how many threads read or write, which the user has given or which is chosen by the number of cores.

    Raises:
        InvalidArgument: it cannot be used
    """
    return min(8, os.cpu_count() or 1) if threads is None else _validate.integer("threads", threads, 1)


def _all(pool: ThreadPoolExecutor, call: Callable[[Any], Any], jobs: Iterable[Any]) -> list[Any]:
    """Calls ``call`` with each of ``jobs`` in the threads of ``pool``; raises the first error."""
    return list(pool.map(call, jobs))


def _pieces(parts: list[_Part]) -> Iterator[tuple[_Part, Piece]]:
    return ((part, piece) for part in parts for piece in part.pieces)


def arrays_of(folder: Path) -> Iterator[ZarrArray]:
    """Yields the arrays of a checkpoint, in the order of their names.

    Raises:
        CheckpointingException: the metadata of one of them cannot be used
    """
    for above, names, _ in os.walk(folder):
        names.sort()
        for name in names.copy():
            path = Path(above) / name
            if path.suffix == ".sync":
                names.remove(name)
            elif (path / ARRAY).exists():
                names.remove(name)
                yield open_array(folder, path.relative_to(folder).as_posix())


def objects_of(folder: Path) -> list[tuple[Any, Path]]:
    """Returns the objects of a checkpoint as ``ShardedObject`` without data, each with its file.

    Raises:
        CheckpointingException: a file has no name of an object
    """
    found = []
    for subfolder in sorted(path for path in folder.iterdir() if path.is_dir()):
        leaves = []
        for path in sorted(subfolder.glob("shard_*.pt")):
            try:
                leaf = ShardedObject.empty_from_unique_key(f"{subfolder.name}/{path.stem}")
            except (ValueError, AssertionError) as e:
                raise CheckpointingException(f"{path} does not have the name of an object's file") from e
            leaves.append((leaf, path))
        # Early releases left the last number of the shape out of the name.
        last = max((leaf.global_offset[-1] for leaf, _ in leaves), default=0)
        for leaf, path in leaves:
            if leaf.global_shape[-1] < 0:
                leaf.global_shape = (*leaf.global_shape[:-1], last + 1)
            found.append((leaf, path))
    return found


def load_object(folder: Path, leaf: Any, allowed: Allowed) -> Any:
    """Returns the value of an object.

    Args:
        folder: the checkpoint
        leaf: the ``ShardedObject``
        allowed: the globals that its pickle may name

    Raises:
        CheckpointingException: it is not there, or may not be unpickled
    """
    path = path_of(folder, f"{leaf.unique_key}.pt")
    # Early releases left the last number of the shape out of the name.
    early = path_of(folder, f"{os.path.splitext(leaf.unique_key)[0]}.pt")
    try:
        return unpickled(
            common.read_whole(path if path.exists() or not early.exists() else early), leaf.unique_key, allowed
        )
    except FileNotFoundError as e:
        raise CheckpointingException(
            f"Object shard {path} not found: the checkpoint has no object {leaf.unique_key!r}. Objects cannot be "
            "resharded: load with as many ranks as it was saved with, or without this key (strict=)"
        ) from e
    except TensorferryError as e:
        raise CheckpointingException(f"{path}: {e}") from e


def _whole(array: ZarrArray) -> Any:
    meta = torch.empty(array.shape, dtype=array.dtype, device="meta")
    return ShardedTensor.from_rank_offsets(array.key, meta).without_data()


def _check_saved(shard: Any) -> None:
    if shard.data is None:
        raise CheckpointingException(f"{shard.key}: the main replica of a shard has no data to save")
    if shard.dtype not in DTYPES.values():
        raise CheckpointingException(
            f"{shard.key} is of {shard.dtype}, which checkpoints of backend 'zarr' do not have: convert it first, or "
            "save with tensorferry's save_strategy()"
        )
    if ARRAY in shard.key.split("/") or shard.key.endswith(".sync"):
        raise CheckpointingException(f"{shard.key!r} is a name that checkpoints of backend 'zarr' reserve")


def _array_for(folder: Path, shard: Any) -> ZarrArray:
    """Returns the array of a tensor whose first shard this is; the shard's shape becomes that of a chunk."""
    sizes = shards.box_of(shard).sizes
    chunks = tuple(max(n, 1) for n in sizes)
    return ZarrArray(
        new_path_of(folder, shard.key), shard.key, tuple(map(int, shard.global_shape)), chunks, shard.dtype
    )


def _save_object(folder: Path, leaf: Any) -> None:
    if leaf.key == COMMON:
        # Releases since 0.19 pass the common state as an object.
        common.write(folder, common.encoded(leaf.data))
        return
    path = new_path_of(folder, f"{leaf.unique_key}.pt")
    data = common.encoded(leaf.data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data, path.with_name(f"{path.name}.{secrets.token_hex(6)}.partial"))
        sync_folder(path.parent)
    except OSError as e:
        raise CheckpointingException(f"{path} cannot be written: {e}") from e
