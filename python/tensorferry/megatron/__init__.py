"""For Megatron-core's ``dist_checkpointing``: strategies that save and load, from files and between running jobs.

``save_strategy()`` and ``load_strategy()`` return what ``dist_checkpointing.save`` and ``load`` take as
``sharded_strategy=``; ``save`` and ``load`` here do the same and raise every error on every rank.
docs/guides/megatron.md is the guide.
"""

from .common_part import CommonLoadStrategy, CommonSaveStrategy
from .interfaces import StrategyAction, register_default_strategy
from .load import LoadStrategy, load_strategy
from .save import BACKEND, VERSION, SaveStrategy, save_strategy
from .serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    publish,
    remove_sharded_tensors,
    restore_common,
    save,
)
from .two_stage import TwoStageDataParallelLoadShardedStrategy
from .zarr import TensorStoreLoadShardedStrategy, ZarrLoadShardedStrategy, ZarrSaveShardedStrategy

__all__ = [
    "BACKEND",
    "VERSION",
    "CommonLoadStrategy",
    "CommonSaveStrategy",
    "LoadStrategy",
    "SaveStrategy",
    "TensorStoreLoadShardedStrategy",
    "TwoStageDataParallelLoadShardedStrategy",
    "ZarrLoadShardedStrategy",
    "ZarrSaveShardedStrategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_strategy",
    "load_tensors_metadata",
    "publish",
    "remove_sharded_tensors",
    "restore_common",
    "save",
    "save_strategy",
]

# Releases that have a registry find the strategies of a checkpoint by its metadata.json.
register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, save_strategy())
register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, load_strategy())
register_default_strategy(StrategyAction.SAVE_SHARDED, "zarr", 1, ZarrSaveShardedStrategy())
register_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1, TensorStoreLoadShardedStrategy())
register_default_strategy(StrategyAction.SAVE_COMMON, BACKEND, VERSION, CommonSaveStrategy())
register_default_strategy(StrategyAction.LOAD_COMMON, BACKEND, VERSION, CommonLoadStrategy())
