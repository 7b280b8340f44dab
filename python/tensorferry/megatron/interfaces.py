"""The interfaces of ``dist_checkpointing.strategies.base``, by their names, whichever of them the release still has.

Releases of megatron-core before 0.17 have these classes, and a registry of strategies by backend and version; the names
below are the release's own then. Later ones have dropped them: the classes below have the same methods then, and the
registry is ours. docs/guides/megatron.md has a table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import release
from .release import CheckpointingException

__all__ = [
    "AsyncSaveShardedStrategy",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "StrategyAction",
    "get_default_strategy",
    "register_default_strategy",
]

if release.BASE is not None and not TYPE_CHECKING:
    StrategyAction = release.BASE.StrategyAction
    LoadStrategyBase = release.BASE.LoadStrategyBase
    SaveStrategyBase = release.BASE.SaveStrategyBase
    LoadCommonStrategy = release.BASE.LoadCommonStrategy
    SaveCommonStrategy = release.BASE.SaveCommonStrategy
    LoadShardedStrategy = release.BASE.LoadShardedStrategy
    SaveShardedStrategy = release.BASE.SaveShardedStrategy
    AsyncSaveShardedStrategy = release.BASE.AsyncSaveShardedStrategy
    get_default_strategy = release.BASE.get_default_strategy
    register_default_strategy = release.BASE.register_default_strategy
else:

    class StrategyAction(Enum):
        """What a strategy does: load or save, the common part or the sharded one."""

        LOAD_COMMON = "load_common"
        LOAD_SHARDED = "load_sharded"
        SAVE_COMMON = "save_common"
        SAVE_SHARDED = "save_sharded"

    class LoadStrategyBase(ABC):
        """What all strategies that load have: checks whether they can read a checkpoint."""

        @abstractmethod
        def check_backend_compatibility(self, loaded_version: str) -> None:
            """Raises ``CheckpointingException`` if this strategy does not read checkpoints of this backend."""

        @abstractmethod
        def check_version_compatibility(self, loaded_version: int) -> None:
            """Raises ``CheckpointingException`` if this strategy does not read this version of its format."""

        @property
        def can_handle_sharded_objects(self) -> bool:
            """Whether this strategy loads ``ShardedObject`` values."""
            return False

    class SaveStrategyBase(ABC):  # noqa: B024  # Megatron's had no abstract method either
        """What all strategies that save have: the backend and version that ``metadata.json`` gets."""

        def __init__(self, backend: str, version: int) -> None:
            self.backend = backend
            self.version = version

        @property
        def can_handle_sharded_objects(self) -> bool:
            """Whether this strategy saves ``ShardedObject`` values."""
            return False

        def __str__(self) -> str:
            return f"{type(self).__name__}({self.backend}, {self.version})"

    class LoadCommonStrategy(LoadStrategyBase):
        """Loads the common part of a state, which is the same on all ranks."""

        @abstractmethod
        def load_common(self, checkpoint_dir: str | Path) -> Any:
            """Returns the common part."""

        @abstractmethod
        def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str | Path) -> Any:
            """Returns the values of ``ShardedObject`` leaves, for a sharded strategy that does not load them."""

    class LoadShardedStrategy(LoadStrategyBase):
        """Loads the sharded part of a state."""

        @abstractmethod
        def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
            """Returns the state with the values from the checkpoint in place of its sharded leaves."""

        @abstractmethod
        def load_tensors_metadata(self, checkpoint_dir: str | Path) -> Any:
            """Returns the tensors of a checkpoint by key, as ``ShardedTensor`` without data and without shards."""

        def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
            """Like ``load_tensors_metadata``, but with the checkpoint's ``ShardedObject`` leaves, too.

            Raises:
                NotImplementedError: always here for a strategy that loads such leaves, which has a method of its own
            """
            if self.can_handle_sharded_objects:
                raise NotImplementedError
            return self.load_tensors_metadata(checkpoint_dir)

        def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
            """Removes the tensors and objects whose keys begin with ``key_prefix``.

            Raises:
                NotImplementedError: always here; a strategy that can do it has a method of its own
            """
            raise NotImplementedError

    class SaveCommonStrategy(SaveStrategyBase):
        """Saves the common part of a state."""

        @abstractmethod
        def save_common(self, common_state_dict: Any, checkpoint_dir: str | Path) -> None:
            """Saves the common part, on one rank."""

        def save_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str | Path) -> None:
            """Saves ``ShardedObject`` leaves, for a sharded strategy that does not save them.

            Raises:
                NotImplementedError: always here; a strategy that can do it has a method of its own
            """
            raise NotImplementedError

    class SaveShardedStrategy(SaveStrategyBase):
        """Saves the sharded part of a state."""

        @abstractmethod
        def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
            """Saves the shards that this rank is the main replica of."""

    class AsyncSaveShardedStrategy(SaveShardedStrategy):
        """Saves the sharded part of a state in the background as well."""

        @abstractmethod
        def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
            """Returns the ``AsyncRequest`` with which the caller schedules the save."""

    _registered: dict[tuple[StrategyAction, str, int], Any] = {}

    def register_default_strategy(action: StrategyAction, backend: str, version: int, strategy: Any) -> None:
        """Registers the strategy that :func:`get_default_strategy` returns for an action, backend and version."""
        _registered[action, backend, version] = strategy

    def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
        """Returns the strategy that is registered for an action, a backend and a version.

        Raises:
            CheckpointingException: there is none
        """
        try:
            return _registered[action, backend, version]
        except KeyError:
            known = sorted({f"{name} {number}" for _, name, number in _registered})
            raise CheckpointingException(
                f"Cannot find a default strategy for: {(action.value, backend, version)}; there are those of "
                f"{', '.join(known)}"
            ) from None
