"""torchtitan's checkpoint manager, saving and loading with tensorferry's files."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from ..dcp.file_reader import FileReader
from ..dcp.file_writer import FileWriter
from ..storage.objects import client
from ..storage.places import is_store_url


class FileCheckpointManager(CheckpointManager):  # type: ignore[misc]  # mypy does not follow torchtitan
    """torchtitan's checkpoint manager, with ``FileWriter`` and ``FileReader`` for folders and object stores.

    Checkpoints of torch's own writer load as before, and so do Hugging Face's and those behind other URLs. Without the
    extra ``objects``, stores are left to torchtitan as well.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The configuration of torchtitan's manager, and the options of the writer and the reader."""

        threads: int | None = None
        """Threads with which a rank writes and reads; ``None`` chooses by the number of cores."""

        cached: bool | None = None
        """Whether large files are written through the page cache, as for ``FileWriter``."""

        safe_globals: list[Any] = field(default_factory=list)
        """Classes and functions that pickled objects may name besides the default list, or their names, such as
        ``my.module.Class``."""

        trust_pickle: bool = False
        """Let pickled objects name anything, as for ``FileReader``."""

    def __init__(self, config: Config, **given: Any) -> None:
        named = [pkgutil.resolve_name(one) if isinstance(one, str) else one for one in config.safe_globals]
        self._options: dict[str, Any] = {
            "threads": config.threads,
            "safe_globals": named,
            "trust_pickle": config.trust_pickle,
        }
        self._cached = config.cached
        super().__init__(config, **given)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Saves with ``FileWriter``; Hugging Face's format and URLs of no store are left to torchtitan.

        Returns:
            What ``dcp.save`` or ``dcp.async_save`` returns, by the mode.
        """
        if to_hf or not _is_place(checkpoint_id):
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer = FileWriter(checkpoint_id, cached=self._cached, **self._options)
        if async_mode == AsyncMode.ASYNC:
            saving = dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
        elif async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            saving = dcp.async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        else:
            saving = dcp.save(state_dict, storage_writer=writer)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saving

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Loads with ``FileReader``; Hugging Face's format and URLs of no store are left to torchtitan."""
        if from_hf or not _is_place(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, storage_reader=FileReader(checkpoint_id, **self._options))
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)


def _is_place(checkpoint_id: str) -> bool:
    """Whether ``FileWriter`` and ``FileReader`` can take it: a folder, or a place in a store."""
    return not filesystem.is_remote(checkpoint_id) or (is_store_url(checkpoint_id) and client.is_installed())
