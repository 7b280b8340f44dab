"""Tensors of torch without memory of their own (DTensor and the like), and tensors rebuilt as another class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ... import _rebuild
from . import torch_tensors
from .kinds import Function, Globals, as_value, attributes_of, checked_sizes, kind_of, require, set_attributes
from .torch_tensors import is_dense, rebuild_parameter_with_state

if TYPE_CHECKING:
    from ..unpickler import Unpickler


def _rebuild_wrapper(
    unpickler: Unpickler,
    cls: Any,
    dtype: Any,
    size: Any,
    stride: Any,
    offset: Any,
    layout: Any,
    device: Any,
    grad: Any,
) -> Tensor:
    require(_is_wrapper(cls) or unpickler.is_user_listed(cls), "a wrapper of an unknown class")
    # A class that does not handle each operation itself would read memory that it does not have.
    require(
        cls.__torch_dispatch__ is not Tensor.__torch_dispatch__,
        "a wrapper class that does not handle its operations itself",
    )
    require(
        type(dtype) is torch.dtype and type(layout) is torch.layout and type(grad) is bool,
        "a wrapper without a dtype or a layout",
    )
    require(
        type(device) in (str, torch.device) and type(offset) is int and offset >= 0,
        "a wrapper with an invalid device or offset",
    )
    shape, steps = checked_sizes(size, "a shape"), checked_sizes(stride, "strides")
    return torch._utils._rebuild_wrapper_subclass(cls, dtype, shape, steps, offset, layout, device, grad)


def _is_wrapper(cls: Any) -> bool:
    return kind_of(cls) is not None and cls.__name__ in _WRAPPED


#: The parts of each tensor class without memory of its own: names of attributes, and the name of the class of each.
_WRAPPED: dict[str, dict[str, str]] = {
    "DTensor": {"_local_tensor": "Tensor", "_spec": "DTensorSpec"},
    "ShardedTensor": {},
}


def _is_a(value: Any, name: str) -> bool:
    if name == "Tensor":
        return isinstance(value, Tensor)
    kind = kind_of(type(value))
    return kind is not None and kind.cls.__name__ == name


def _rebuild_from_type(unpickler: Unpickler, rebuild: Any, cls: Any, args: Any, state: Any) -> Tensor:
    """Does what ``torch._tensor._rebuild_from_type_v2`` does."""
    run = rebuild.run if type(rebuild) is Function else None
    require(run in _REBUILDING or unpickler.is_user_listed(rebuild), "a function that does not rebuild tensors")
    require(type(args) is tuple, "arguments that are not a tuple")
    made: Tensor = rebuild(*args) if run is None else run(unpickler, *args)
    if kind_of(cls) is None and unpickler.is_user_listed(cls):
        if type(made) is not cls:
            require(
                issubclass(cls, Tensor) and type(made) in (Tensor, Parameter),
                "a class other than that of the rebuilt tensor",
            )
            made = made.as_subclass(cls)
        if cls.__setstate__ is not Tensor.__setstate__:
            cls.__setstate__(made, state)
        else:
            torch._utils._set_obj_state(made, state)
        return made
    if run is _rebuild_wrapper:
        require(type(made) is cls, "a wrapper rebuilt as another class")
        if cls.__name__ == "ShardedTensor":
            _set_sharded(made, state, unpickler.allowed.detaches)
            return made
        named = attributes_of(state)
        for name, kind in _WRAPPED[cls.__name__].items():
            require(_is_a(named.get(name), kind), f"a {cls.__name__} without its {name}")
        set_attributes(made, state)
        return made
    require(type(made) is cls, "a class other than that of the rebuilt tensor")
    set_attributes(made, state)
    return made


def _set_sharded(made: Any, state: Any, detaches: bool) -> None:
    """Sets the state of a ShardedTensor; with ``detaches``, also one of a process group that is not here."""
    require(type(state) is tuple and len(state) == 5, "a ShardedTensor that does not have five parts")
    shards, metadata, group, spec, remote = state
    require(
        type(shards) is list and all([_is_a(shard, "Shard") for shard in shards]),
        "a ShardedTensor whose shards are not a list of Shard",
    )
    require(
        _is_a(metadata, "ShardedTensorMetadata") and _is_a(group, "ProcessGroupState"),
        "a ShardedTensor without metadata or a process group",
    )
    require(
        _is_a(spec, "EnumerableShardingSpec") or _is_a(spec, "ChunkShardingSpec"),
        "a ShardedTensor with an unknown sharding spec",
    )
    # With remote references torch would contact the other ranks and wait for them.
    require(remote is False, "a ShardedTensor with remote references")
    try:
        made.__setstate__(state)
    except RuntimeError:
        # There is no process group, or one of other ranks than those that saved it.
        if not detaches:
            raise
        made._local_shards, made._metadata, _, made._sharding_spec, made._init_rrefs = state
        made._process_group = None


def _with_grad(_: Unpickler, value: Any) -> Tensor:
    require(isinstance(value, Tensor), "a value that is not a tensor")
    return _rebuild.with_grad(value)


def _rebuild_dtensor(_: Unpickler, local: Any, spec: Any, grad: Any) -> Tensor:
    require(
        is_dense(local) and _is_a(spec, "DTensorSpec") and type(grad) is bool,
        "a DTensor that is not a dense tensor, a DTensorSpec and a bool",
    )
    return _rebuild.rebuild_dtensor(local, spec, grad)


#: The classes: module, name, and the function that creates the ``Kind`` of the class.
CLASSES: Globals = {
    "torch.distributed.tensor": {"DTensor": as_value},
    "torch.distributed._shard.sharded_tensor.api": {"ShardedTensor": as_value},
}

#: The functions: module, name, and the checked function that runs in place of the named one.
FUNCTIONS: Globals = {
    "torch._utils": {"_rebuild_wrapper_subclass": _rebuild_wrapper},
    "torch._tensor": {"_rebuild_from_type_v2": _rebuild_from_type},
    "tensorferry._rebuild": {"rebuild_dtensor": _rebuild_dtensor, "with_grad": _with_grad},
}

#: The functions that a pickle may pass to ``_rebuild_from_type_v2``.
_REBUILDING = {*torch_tensors.FUNCTIONS["torch._utils"].values(), _rebuild_wrapper} - {rebuild_parameter_with_state}
