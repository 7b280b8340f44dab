"""Saving checkpoints of backend ``zarr``; ``zarr.py`` describes and loads them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..storage.places import local_path
from ..storage.whole_files import sync_folder
from . import shards
from .formats.zarr_arrays import ARRAY, DTYPES, ZarrArray, new_path_of, open_array
from .formats.zarr_folders import save_object
from .interfaces import SaveShardedStrategy
from .release import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    TorchDistSaveShardedStrategy,
    is_main_replica,
)
from .together import Together
from .zarr import BACKEND, VERSION, call_all, thread_count


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
        tensors: list[Any] = []
        objects: list[Any] = []

        def collect_and_create() -> None:
            for _, leaf in shards.leaves(sharded_state_dict):
                if isinstance(leaf, ShardedTensor):
                    shards.check(leaf)
                if is_main_replica(leaf.replica_id):
                    (objects if isinstance(leaf, ShardedObject) else tensors).append(leaf)
            for shard in tensors:
                _check_saved(shard)
                if not any(shard.global_offset) and (shards.box_of(shard).numel or not all(shard.global_shape)):
                    _array_for(folder, shard).create()

        def write_own() -> None:
            for leaf in objects:
                save_object(folder, leaf)
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
                call_all(pool, lambda job: job[0].write(*job[1:]), jobs)
            for path in {folder, *(array.path for array in arrays.values())}:
                sync_folder(path)

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


def _check_saved(shard: Any) -> None:
    """Refuses a shard that has no data, or a dtype or key that a checkpoint of this backend cannot have."""
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
