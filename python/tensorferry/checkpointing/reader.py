"""``CheckpointReader``: what torch's own experimental checkpointers take to load with."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from .. import _validate
from ..pickles.allowlist import Allowed
from . import loading
from .ranks import Ranks

try:
    from torch.distributed.checkpoint._experimental.checkpoint_reader import CheckpointReader as _TorchReader
except ImportError:  # torch 2.8 has none
    _TorchReader = object


class CheckpointReader(_TorchReader):  # type: ignore[misc]  # mypy does not follow torch
    """Reads checkpoints of this package's checkpointers and of torch's ``CheckpointWriter``.

    Torch's own checkpointers take it as ``reader=``. From torch 2.9 on it is a ``CheckpointReader`` of torch.

    Args:
        rank_info: torch's ``RankInfo``; by default that of ``torch.distributed``, or rank 0 of 1
        threads: threads that read; ``None`` chooses by the number of cores
        safe_globals: classes and functions that pickled objects may name, besides the default list
        trust_pickle: lets them name anything
        timeout: how long all requests of a load to an object store may take together, 10 minutes by default

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self,
        rank_info: Any = None,
        *,
        threads: int | None = None,
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        if rank_info is None:
            ranks = Ranks(None, None, None, None)
            self._rank, self._world_size = ranks.rank, ranks.world_size
        else:
            self._rank, self._world_size = rank_info.global_rank, rank_info.global_world_size
        self._rank_info = rank_info
        self._threads = None if threads is None else _validate.integer("threads", threads, 1)
        self._allowed = Allowed(safe_globals, trust_pickle)
        if timeout is not None:
            _validate.patience("timeout", timeout)
        self._timeout = timeout

    def read(
        self,
        path: str | os.PathLike[str],
        state_dict: Any = None,
        *,
        map_location: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, list[str]]:
        """Loads a checkpoint.

        Args:
            path: the folder, or a single file
            state_dict: loads only the keys of this state, into its tensors where dtype and layout allow
            map_location: where other tensors go, as ``torch.load`` has it
            kwargs: ignored; torch's checkpointers hand on what their ``load`` is called with

        Returns:
            The state, ``state_dict`` itself if it was given; and its keys that the checkpoint lacks.

        Raises:
            IncompleteCheckpoint: there is no complete checkpoint. It is a ``FileNotFoundError``
            StateMismatch: values differ in dtype, shape or type; nothing was overwritten, unless the message says
                otherwise. It is a ``RuntimeError``
            TensorferryError: the checkpoint is damaged, cannot be read, or names what is not on the allow-list; some
                tensors of ``state_dict`` may have new values
        """
        del kwargs
        return loading.read(
            path,
            state_dict,
            map_location=map_location,
            rank=self._rank,
            world_size=self._world_size,
            allowed=self._allowed,
            threads=self._threads,
            timeout=self._timeout,
        )
