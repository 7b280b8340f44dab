"""Checkpoints of backend ``zarr``, which megatron-core had until 0.15: one Zarr array for each tensor.

``common.pt`` holds the common state and ``KEY/shard_OFFSET_SHAPE.pt`` the objects, as ``torch.save`` writes them.
``zarr_arrays.py`` has the format of the arrays. This module loads them, and ``zarr_save.py`` saves them.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .. import _validate
from ..memory.tensors import count_as_written, scratch, why_not_writable
from ..pickles.allowlist import Allowed
from ..storage.places import local_path
from . import common, shards
from .formats.zarr_arrays import PieceOfChunk, ZarrArray, open_array
from .formats.zarr_folders import arrays_of, load_object, objects_of
from .interfaces import LoadShardedStrategy
from .release import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
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
        """Loads the state, into the data of its tensors where that lies in host memory. All ranks call it.

        In place of data on an accelerator, the result has a tensor in host memory, and the data stays as it is. Leaves
        without data get some in host memory. Nothing is overwritten before all ranks have found what they need.

        Args:
            sharded_state_dict: dicts and lists of ``ShardedTensor`` and ``ShardedObject``
            checkpoint_dir: the folder
            async_strategy: not used

        Returns:
            The same dicts and lists with tensors and values in place of the leaves.

        Raises:
            CheckpointingException: a key is not in the checkpoint or has another shape, an object may not be unpickled,
                or something is missing, damaged or cannot be read; it is raised on all ranks
            InvalidArgument: ``checkpoint_dir`` is no path of this machine; it is raised on this rank alone
        """
        del async_strategy
        folder, ranks = local_path(checkpoint_dir, "checkpoint_dir"), Together(self._group)
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
            call_all(pool, lambda job: job[0].array.check_chunk(job[1].chunk), _pieces(parts))

    def _read(self, folder: Path, values: dict[int, Any], parts: list[_Part]) -> None:
        """Reads ``parts``, and adds their tensors to ``values``."""
        for part in parts:
            values[id(part.shard)] = part.allocate(self._on_device)
        with ThreadPoolExecutor(self._threads, "tensorferry-zarr") as pool:
            read = call_all(pool, lambda job: job[0].read(job[1]), _pieces(parts))
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
            InvalidArgument: ``checkpoint_dir`` is no path of this machine
        """
        self._check_folder(local_path(checkpoint_dir, "checkpoint_dir"))
        return {array.key: _whole(array) for array in arrays_of(local_path(checkpoint_dir, "checkpoint_dir"))}

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Like :meth:`load_tensors_metadata`, with the checkpoint's objects by their unique keys.

        Raises:
            CheckpointingException: the checkpoint cannot be read
            InvalidArgument: ``checkpoint_dir`` is no path of this machine
        """
        tensors = self.load_tensors_metadata(checkpoint_dir)
        return {
            **{leaf.unique_key: leaf for leaf, _ in objects_of(local_path(checkpoint_dir, "checkpoint_dir"))},
            **tensors,
        }


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
        """Returns the tensor that is read to, after zeroing what the array does not have. A leaf without data gets it.

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
        count_as_written([target])
        whole = target[(None,) * shard.prepend_axis_num]
        _zero_beyond(whole, self._there)
        self._target = whole[tuple(slice(0, n) for n in self._there)]
        return target

    def read(self, piece: PieceOfChunk) -> int:
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


def call_all(pool: ThreadPoolExecutor, call: Callable[[Any], Any], jobs: Iterable[Any]) -> list[Any]:
    """Calls ``call`` with each of ``jobs`` in the threads of ``pool``; raises the first error."""
    return list(pool.map(call, jobs))


def _pieces(parts: list[_Part]) -> Iterator[tuple[_Part, PieceOfChunk]]:
    return ((part, piece) for part in parts for piece in part.pieces)


def _whole(array: ZarrArray) -> Any:
    meta = torch.empty(array.shape, dtype=array.dtype, device="meta")
    return ShardedTensor.from_rank_offsets(array.key, meta).without_data()
