"""Strategies for checkpoints of backend ``zarr``, which megatron-core had until 0.15."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .. import _validate
from ..memory.tensors import why_not_writable
from ..pickles.allowlist import Allowed
from ..storage.boxes import Box
from ..storage.places import local_path
from . import common, shards
from .interfaces import LoadShardedStrategy, SaveShardedStrategy
from .release import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    TorchDistSaveShardedStrategy,
    is_main_replica,
)
from .together import Together
from .zarr_folder import ARRAY, ZarrArray, arrays_of, can_save, load_object, objects_of, save_object

BACKEND, VERSION = "zarr", 1


class ZarrLoadShardedStrategy(LoadShardedStrategy):
    """Loads checkpoints of backend ``zarr``, for ``dist_checkpointing.load(..., sharded_strategy=)``.

    Args:
        safe_globals: classes and functions that pickled objects may name besides the default list
        trust_pickle: read pickles without limits: whoever can write to the folder can then run code here
        process_group: the ranks that load together; ``None`` means all

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self, *, safe_globals: Iterable[Any] = (), trust_pickle: bool = False, process_group: Any = None
    ) -> None:
        super().__init__()
        self._allowed = Allowed(safe_globals, trust_pickle)
        self._group = process_group
        self._on_device = False

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
        parts: list[tuple[ShardedTensor, ZarrArray, Box]] = []

        def check() -> None:
            self._check_folder(folder)
            for _, leaf in shards.leaves(sharded_state_dict):
                if isinstance(leaf, ShardedObject):
                    values[id(leaf)] = load_object(folder, leaf, self._allowed)
                else:
                    array = ZarrArray(folder, leaf.key)
                    parts.append((leaf, array, _part(leaf, array)))

        def read() -> None:
            for leaf, array, part in parts:
                values[id(leaf)] = self._target(leaf)
                sizes = part.sizes[leaf.prepend_axis_num :]
                found = array.read(part).reshape(sizes if part.numel else [0] * len(sizes))
                values[id(leaf)].copy_(pad_to_expected_shape(found, leaf))

        # First on all ranks, before a byte of anyone's tensors is overwritten.
        with ranks.counting_on_each_other():
            ranks.every(f"load {folder}", check)
            ranks.every(f"load {folder}", read)
        return shards.replaced(sharded_state_dict, lambda leaf: values[id(leaf)])

    def _target(self, leaf: ShardedTensor) -> torch.Tensor:
        """Returns the tensor that a leaf is loaded into. A leaf without data gets it."""
        target = leaf.data
        if target is None or (target.device.type != "cpu" and not self._on_device):
            target = torch.empty(tuple(leaf.local_shape), dtype=leaf.dtype, device="cpu")
        if leaf.data is None:
            leaf.data = target
        return target.detach()

    def _check_folder(self, folder: Path) -> None:
        config = common.config(folder)
        self.check_backend_compatibility(config.sharded_backend)
        self.check_version_compatibility(config.sharded_backend_version)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Returns the tensors of a checkpoint by key, as ``ShardedTensor`` without data and without shards.

        Raises:
            CheckpointingException: the checkpoint cannot be read
            InvalidArgument: ``checkpoint_dir`` is no path of this machine
        """
        folder = local_path(checkpoint_dir, "checkpoint_dir")
        self._check_folder(folder)
        return {
            array.key: ShardedTensor.from_rank_offsets(
                array.key, torch.empty(array.shape, dtype=array.dtype, device="meta")
            ).without_data()
            for array in arrays_of(folder)
        }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Like :meth:`load_tensors_metadata`, with the checkpoint's objects by their unique keys.

        Raises:
            CheckpointingException: the checkpoint cannot be read
            InvalidArgument: ``checkpoint_dir`` is no path of this machine
        """
        tensors = self.load_tensors_metadata(checkpoint_dir)
        return {**objects_of(local_path(checkpoint_dir, "checkpoint_dir")), **tensors}


class TensorStoreLoadShardedStrategy(ZarrLoadShardedStrategy):
    """Loads checkpoints of backend ``zarr``; the default of those releases.

    Args:
        load_directly_on_device: load into ``data`` on an accelerator, too; without it, tensors on accelerators stay as
            they are, and what is returned in their place lies in host memory, as in those releases
        options: as for :class:`ZarrLoadShardedStrategy`

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(self, load_directly_on_device: bool = False, **options: Any) -> None:
        super().__init__(**options)
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
        process_group: the ranks that save together; ``None`` means all

    Raises:
        CheckpointingException: ``backend`` or ``version`` is another one
    """

    def __init__(self, backend: str = BACKEND, version: int = VERSION, *, process_group: Any = None) -> None:
        if (backend, version) != (BACKEND, VERSION):
            raise CheckpointingException(
                f"ZarrSaveShardedStrategy writes the backend {BACKEND!r} of version {VERSION}, not {backend!r} of "
                f"version {version!r}"
            )
        TorchDistSaveShardedStrategy.__init__(self, backend, version)
        self._group = process_group

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Always true."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Saves the shards and objects that this rank is the main replica of. All ranks call it.

        What a failed save has written stays, so the next one into this folder finds its arrays there already. Whether
        the shards make up each tensor is not checked.

        Raises:
            CheckpointingException: a shard has no data, a dtype or key that such a checkpoint cannot have, or fields
                that do not fit together, the ranks disagree on a tensor, an array is there already, or the system
                refuses; it is raised on all ranks
            InvalidArgument: ``checkpoint_dir`` is no path of this machine; it is raised on this rank alone
        """
        folder = local_path(checkpoint_dir, "checkpoint_dir")
        ranks = Together(self._group)
        tensors: list[ShardedTensor] = []
        objects: list[ShardedObject] = []

        def collect_and_create() -> None:
            for _, leaf in shards.leaves(sharded_state_dict):
                if isinstance(leaf, ShardedTensor):
                    shards.check(leaf)
                if is_main_replica(leaf.replica_id):
                    (objects if isinstance(leaf, ShardedObject) else tensors).append(leaf)
            for shard in tensors:
                _check_saved(shard)
                box = shards.box_of(shard)
                if not any(box.offsets) and (box.numel or not all(shard.global_shape)):
                    ZarrArray(folder, shard.key, writes=True, new=(tuple(shard.global_shape), box.sizes, shard.dtype))

        def write_own() -> None:
            for leaf in objects:
                save_object(folder, leaf)
            for shard in tensors:
                array = ZarrArray(folder, shard.key, writes=True)
                if (array.shape, array.dtype) != (tuple(shard.global_shape), shard.dtype):
                    raise CheckpointingException(
                        f"{shard.key}: the ranks do not agree on it: it is {shard.dtype} {list(shard.global_shape)} on "
                        f"this one, and {array.dtype} {list(array.shape)} on another one"
                    )
                array.write(shards.box_of(shard), shards.with_axes(shard))

        with ranks.counting_on_each_other():
            ranks.every(f"save into {folder}", collect_and_create)
            ranks.every(f"save into {folder}", write_own)

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


def _part(shard: ShardedTensor, array: ZarrArray) -> Box:
    """Returns the part of an array that a shard is, as far as the array reaches.

    Raises:
        CheckpointingException: the shard does not fit the array, or cannot be written to; or a chunk is missing
    """
    shards.check(shard)
    box, asked = shards.box_of(shard), tuple(shard.global_shape)
    if len(asked) != len(array.shape) or (asked != array.shape and not shard.allow_shape_mismatch):
        raise CheckpointingException(
            f"Global shape mismatch for loaded ({array.shape}) and expected ({asked}) tensor for key {shard.key}: "
            "build the model that was saved, or mark a padded tensor with allow_shape_mismatch=True"
        )
    if shard.data is not None and (why := why_not_writable(shard.data.detach())) is not None:
        raise CheckpointingException(f"{shard.key}: its data cannot be written to: {why}")
    ends = [min(a + n, dim) for a, n, dim in zip(*box, array.shape, strict=True)]
    starts = [min(a, end) for a, end in zip(box.offsets, ends, strict=True)]
    part = Box(tuple(starts), tuple(b - a for a, b in zip(starts, ends, strict=True)))
    array.check(part)
    return part


def _check_saved(shard: ShardedTensor) -> None:
    """Refuses a shard that has no data, or a dtype or key that a checkpoint of this backend cannot have."""
    if shard.data is None:
        raise CheckpointingException(f"{shard.key}: the main replica of a shard has no data to save")
    if not can_save(shard.dtype):
        raise CheckpointingException(
            f"{shard.key} is of {shard.dtype}, which checkpoints of backend 'zarr' do not have: convert it first, or "
            "save with tensorferry's save_strategy()"
        )
    if ARRAY in shard.key.split("/") or shard.key.endswith(".sync"):
        raise CheckpointingException(f"{shard.key!r} is a name that checkpoints of backend 'zarr' reserve")


def pad_to_expected_shape(x: torch.Tensor, expected_sharded_ten: Any) -> torch.Tensor:
    """Returns ``x`` with zeros behind it in each dimension, up to the shape of a shard.

    Args:
        x: what the checkpoint has of the shard
        expected_sharded_ten: the ``ShardedTensor``

    Raises:
        CheckpointingException: ``x`` has another number of dimensions, or is larger
    """
    shape = tuple(expected_sharded_ten.local_shape)
    if tuple(x.shape) == shape:
        return x
    if x.dim() != len(shape) or any(n > m for n, m in zip(x.shape, shape, strict=True)):
        raise CheckpointingException(
            f"Expected shape {shape} smaller than actual {tuple(x.shape)} for {expected_sharded_ten.key}: it cannot be "
            "padded"
        )
    padded = x.new_zeros(shape)
    padded[tuple(slice(0, n) for n in x.shape)] = x
    return padded
