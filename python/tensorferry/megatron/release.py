"""The installed release of megatron-core: all that tensorferry.megatron takes from it, and where releases differ."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

if find_spec("megatron") is None or find_spec("megatron.core") is None:
    raise ImportError(
        "tensorferry.megatron needs megatron-core (0.16.1 to 0.19.2 are tested), and psutil, which it does not "
        "install itself: pip install megatron-core psutil"
    )

from megatron.core.dist_checkpointing.core import (
    CONFIG_FNAME,
    CheckpointingConfig,
    CheckpointingException,
)
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import StrictHandling, adjust_non_strict_load, parse_strict_flag

__all__ = [
    "BASE",
    "COMMON",
    "COMMON_IS_SHARDED",
    "COMMON_STATE_FNAME",
    "CONFIG_FNAME",
    "CheckpointingConfig",
    "CheckpointingException",
    "ShardedBase",
    "ShardedObject",
    "ShardedTensor",
    "StrictHandling",
    "TorchDistSaveShardedStrategy",
    "adjust_non_strict_load",
    "apply_factory_merges",
    "async_request_class",
    "extract_sharded_base",
    "force_all_tensors_to_non_fp8",
    "is_main_replica",
    "load_preprocess",
    "merge",
    "parse_strict_flag",
    "save_preprocess",
    "takes",
]

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
#: The module with the interfaces and the registry of strategies, if the release has it. In 0.17 and 0.18 it is there,
#: without the registry and the interfaces for the common part, and nothing asks for what is left of it.
BASE: Any = import_module(f"{_STRATEGIES}.base") if find_spec(f"{_STRATEGIES}.base") else None
if not hasattr(BASE, "register_default_strategy"):
    BASE = None
#: The key of the common state. Releases since 0.19 give it to a strategy as an object with this key; before, Megatron
#: writes the common state itself.
COMMON = "common_state"
#: Whether this release gives the common state to a strategy, and so expects it among what a checkpoint holds.
COMMON_IS_SHARDED = hasattr(
    import_module("megatron.core.dist_checkpointing.serialization"), "_legacy_common_state_exists"
)


def async_request_class(async_strategy: str | None) -> Any:
    """Returns the class of the requests that the queue of ``async_strategy`` takes.

    Raises:
        CheckpointingException: there is no such strategy, or it needs a package that is not installed
    """
    strategies = import_module(f"{_STRATEGIES}.torch")
    choose = getattr(strategies, "get_async_strategy", None)
    if choose is None or async_strategy is None:
        return import_module(f"{_STRATEGIES}.async_utils").AsyncRequest
    try:
        return choose(async_strategy)[1]["AsyncRequest"]
    except (TypeError, ImportError) as e:
        raise CheckpointingException(str(e)) from e


def takes(function: Any, argument: str) -> bool:
    """Whether a function of this release has an argument of this name."""
    return argument in inspect.signature(function).parameters
