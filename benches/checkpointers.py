"""The contenders of benches/checkpointing.py: each saves and loads a state, as fast as its own options let it.

Torch's CRC-32, which `torch.load` does not compare, is off where a name does not say "defaults", buffers are kept from
save to save, and files are written by as many threads as there are cores, where there is an option for it. The trainer
gives torch as many threads as there are cores while it saves or loads.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from typing_extensions import override

from dcp_ranks import _copy_plainly

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    State = dict[str, torch.Tensor]
    Load = Callable[[State, Path], object]

OURS, KEEPER = "tensorferry", "tensorferry, keeper"
#: The name of the keeper, whose sockets are in a folder of the contender's.
KEEPER_NAME = "bench"
FLOOR = "a plain copy"
PATIENCE_S = 240
_CORES = os.cpu_count() or 1


class Saver:
    """One contender's way to save and to load; made in the process that trains."""

    #: Whether a checkpoint is on the disk when its future is done.
    durable = False

    def __init__(self) -> None:
        #: Processes that work for it besides descendants of this one.
        self.others: list[int] = []

    def save(self, held: State, path: Path) -> Future[Any] | None:
        """Saves; returns when the state may change, with a future of the end of the write if that goes on."""
        raise NotImplementedError

    def loads(self) -> dict[str, Load]:
        """Returns by name the ways in which it loads what it has written into the tensors of a state."""
        return {}

    def close(self) -> None:
        """Ends its processes."""


def _without_crc() -> None:
    torch.serialization.set_crc32_options(False)


def _torch_load(held: State, path: Path, mapped: bool) -> None:
    loaded = torch.load(path, weights_only=True, mmap=mapped)
    for name, value in held.items():
        value.copy_(loaded[name])


class PlainCopy(Saver):
    """The floor of a save and of a load."""

    _copies: State | None = None

    @override
    def save(self, held: State, path: Path) -> None:
        del path
        if self._copies is None:
            self._copies = {name: torch.empty_like(value) for name, value in held.items()}
        _copy_plainly([(self._copies[name], value) for name, value in held.items()])


class Ours(Saver):
    """Our AsyncCheckpointer, with a keeper if there is a folder with its sockets."""

    durable = True

    def __init__(self, sockets: str | None) -> None:
        super().__init__()
        from tensorferry.checkpointing import AsyncCheckpointer, Keeper

        keeper = None
        if sockets is not None:
            os.environ["TENSORFERRY_KEEPER_DIR"] = sockets
            keeper = Keeper(KEEPER_NAME)
            self.others = [int(keeper.status()["pid"])]
        self._made = AsyncCheckpointer(keeper=keeper)

    @override
    def save(self, held: State, path: Path) -> Future[Any]:
        staged, written = self._made.save(str(path), held)
        staged.result(PATIENCE_S)
        return written

    @override
    def loads(self) -> dict[str, Load]:
        return {"load": lambda held, path: self._made.load(str(path), held)}

    @override
    def close(self) -> None:
        self._made.close()


class TorchCheckpointer(Saver):
    """Torch's AsyncCheckpointer, which writes in another process; its defaults need an accelerator.

    The copy is made at once or, as by default, by a thread; the state may change when it is finished.
    """

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        from torch.distributed.checkpoint._experimental.builder import make_async_checkpointer
        from torch.distributed.checkpoint._experimental.config import CheckpointerConfig
        from torch.distributed.checkpoint._experimental.staging import CheckpointStagerConfig

        staging = CheckpointStagerConfig(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=not at_once, use_non_blocking_copy=False
        )
        self._made = make_async_checkpointer(
            CheckpointerConfig(staging_config=staging), subprocess_init_fn=_without_crc
        )

    @override
    def save(self, held: State, path: Path) -> Future[Any]:
        staged, written = self._made.save(str(path), held)
        staged.result(PATIENCE_S)
        return written

    @override
    def loads(self) -> dict[str, Load]:
        return {
            "load": lambda held, path: self._made.load(str(path), held),
            "torch.load, mapped": lambda held, path: _torch_load(held, path / "checkpoint_0.pt", mapped=True),
        }

    @override
    def close(self) -> None:
        self._made.close()


class _WriterWithoutCrc(dcp.FileSystemWriter):
    """Torch's writer, which turns CRC-32 off in the process that writes."""

    def set_up_storage_writer(self, *arguments: Any, **options: Any) -> None:
        _without_crc()
        super().set_up_storage_writer(*arguments, **options)


class AsyncSave(Saver):
    """`dcp.async_save`, which writes in a thread or in another process."""

    def __init__(self, process: bool, defaults: bool) -> None:
        super().__init__()
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._options: dict[str, Any] = {
            "async_checkpointer_type": AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        }
        self._make_writer: Callable[[Path], Any] = dcp.FileSystemWriter
        self._make_planner: Callable[[], Any] | None = None
        if not defaults:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            staging = StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=process,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
            self._options["async_stager"] = DefaultStager(staging)
            self._make_writer = partial(_WriterWithoutCrc, thread_count=_CORES)
            self._make_planner = partial(dcp.DefaultSavePlanner, enable_plan_caching=True)

    @override
    def save(self, held: State, path: Path) -> Future[Any]:
        planner = self._make_planner() if self._make_planner else None
        return dcp.async_save(held, storage_writer=self._make_writer(path), planner=planner, **self._options)

    @override
    def loads(self) -> dict[str, Load]:
        return {"load": lambda held, path: dcp.load(held, storage_reader=dcp.FileSystemReader(path))}

    @override
    def close(self) -> None:
        if "async_stager" in self._options:
            self._options["async_stager"].close()


class Manager(Saver):
    """torch_checkpointing's manager, which writes in another process and maps files when it loads."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=not at_once, use_non_blocking_copy=False
        )
        # By default it opens files with O_DIRECT, and its writes then fail on ext4, which wants them aligned.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        saving = AsyncCheckpointSaverConfig(
            staging_config=staging, writer_config=CheckpointWriterConfig(file_write_max_threads=_CORES)
        )
        config = CheckpointManager.Config(save=saving, storage_config=storage, subprocess_init_fn=_without_crc)
        self._made = CheckpointManager(config)

    @override
    def save(self, held: State, path: Path) -> Future[Any]:
        self._made.save(str(path), {"state": held})
        if self._made._staging_future is not None:
            self._made._staging_future.result(PATIENCE_S)
        return self._made._write_future

    @override
    def loads(self) -> dict[str, Load]:
        return {"load": self._load}

    def _load(self, held: State, path: Path) -> None:
        loaded = self._made.load(str(path), {"state": held})["state"]
        for name, value in held.items():
            if loaded[name] is not value:
                value.copy_(loaded[name])

    @override
    def close(self) -> None:
        self._made.close()


class TorchSave(Saver):
    """`torch.save`, for which the loop stands still until everything is written."""

    def __init__(self) -> None:
        super().__init__()
        _without_crc()

    @override
    def save(self, held: State, path: Path) -> None:
        torch.save(held, path)

    @override
    def loads(self) -> dict[str, Load]:
        return {"torch.load": partial(_torch_load, mapped=False), "mapped": partial(_torch_load, mapped=True)}


#: By name, what makes a contender, from the folder with the sockets of its keeper if it has one.
MAKERS: dict[str, Callable[[str | None], Saver]] = {
    FLOOR: lambda _: PlainCopy(),
    OURS: Ours,
    KEEPER: Ours,
    "torch AsyncCheckpointer, staged at once": lambda _: TorchCheckpointer(at_once=True),
    "torch AsyncCheckpointer, staged in a thread": lambda _: TorchCheckpointer(at_once=False),
    "dcp.async_save, thread": lambda _: AsyncSave(process=False, defaults=False),
    "dcp.async_save, thread, defaults": lambda _: AsyncSave(process=False, defaults=True),
    "dcp.async_save, process": lambda _: AsyncSave(process=True, defaults=False),
    "dcp.async_save, process, defaults": lambda _: AsyncSave(process=True, defaults=True),
    "torch_checkpointing, staged at once": lambda _: Manager(at_once=True),
    "torch_checkpointing, staged in a thread": lambda _: Manager(at_once=False),
    "torch.save": lambda _: TorchSave(),
}
