"""Classes of torch other than tensors: sizes and devices, placements on a mesh, shards, and results of functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .kinds import (
    Globals,
    Kind,
    Pending,
    all_are,
    attributes_of,
    named_tuple,
    record,
    require,
    set_attributes,
)
from .torch_tensors import is_plain

if TYPE_CHECKING:
    from ..unpickler import Unpickler


def _size(cls: Any) -> Kind:
    def make_size(unpickler: Unpickler, values: Any = ()) -> torch.Size:
        require(type(values) in (tuple, list) and all_are(int, *values), "a Size whose items are not integers")
        unpickler.count_copy(len(values))
        return torch.Size(values)

    return Kind(cls, call=make_size)


def _device(cls: Any) -> Kind:
    def make_device(_: Unpickler, kind: Any, *index: Any) -> torch.device:
        require(type(kind) is str and len(kind) < 100 and len(index) < 2 and all_are(int, *index), "an invalid device")
        return torch.device(kind, *index)

    return Kind(cls, call=make_device)


def _generator(cls: Any) -> Kind:
    def make_generator(_: Unpickler, device: Any) -> torch.Generator:
        require(type(device) is torch.device, "a Generator without a device")
        return torch.Generator(device)

    def restore_generator(_: Unpickler, instance: Any, state: Any) -> Any:
        require(
            type(state) is tuple and len(state) == 3, "a Generator whose state is not a seed, an offset and a tensor"
        )
        seed, offset, tensor = state
        require(
            type(seed) is int and (offset is None or type(offset) is int), "a Generator whose seed is not an integer"
        )
        require(is_plain(tensor) and tensor.dtype is torch.uint8, "a Generator whose state is not a tensor of bytes")
        instance.__setstate__(state)
        return instance

    return Kind(cls, call=make_generator, build=restore_generator)


def _layout(_: Unpickler, name: Any) -> Any:
    require(type(name) is str, "a layout whose name is not a string")
    return torch.serialization._get_layout(name)


def _placement(cls: Any) -> Kind:
    """For ``Shard``, ``Partial`` and the like, created by their constructors: some are C++ objects that need it."""

    def make_placement(_: Unpickler, state: Any) -> Any:
        fields = attributes_of(state)
        require(fields.keys() <= {"dim", "reduce_op", "split_factor"}, "a placement with unexpected fields")
        require(
            all([type(n) is (str if name == "reduce_op" else int) for name, n in fields.items()]),
            "a placement with an invalid field",
        )
        require(
            all([-(1 << 31) < n < 1 << 31 for n in fields.values() if type(n) is int]),
            "a placement with an invalid field",
        )
        return cls(**fields)

    return Kind(cls, new=lambda _: Pending(make_placement))


def _replicate(cls: Any) -> Kind:
    def restore_replicate(_: Unpickler, instance: Any, state: Any) -> Any:
        require(not attributes_of(state), "a placement with unexpected fields")
        return instance

    return Kind(cls, new=lambda _: cls(), build=restore_replicate)


def _mesh(cls: Any) -> Kind:
    def restore_mesh(_: Unpickler, instance: Any, state: Any) -> Any:
        named = attributes_of(state)
        names = named.get("_dim_group_names", [])
        require(
            type(names) is list and all_are(str, *names) and len(names) < 100,
            "a mesh whose group names are not strings",
        )
        set_attributes(instance, state)
        if hasattr(cls, "__setstate__"):
            # It looks up groups with these names in this process. It creates no group and contacts no other rank.
            instance.__setstate__({})
        return instance

    # Not by its constructor, which contacts the other ranks.
    return Kind(cls, new=lambda _: cls.__new__(cls), build=restore_mesh)


def _memory_format(cls: Any) -> Kind:
    def make_memory_format(_: Unpickler, number: Any) -> Any:
        require(type(number) is int, "a memory format that is not a number")
        return cls(number)

    return Kind(cls, call=make_memory_format)


def _properties(cls: Any) -> Kind:
    def restore_properties(_: Unpickler, instance: Any, state: Any) -> Any:
        require(type(state) is tuple and len(state) in (5, 6), "a number of tensor properties other than five or six")
        instance.__setstate__(state)
        return instance

    return Kind(cls, new=lambda _: cls.__new__(cls), build=restore_properties)


#: The classes: module, name, and the function that creates the ``Kind`` of the class.
CLASSES: Globals = {
    "torch": {"Size": _size, "device": _device, "Generator": _generator},
    "torch.distributed.tensor._dtensor_spec": {
        "DTensorSpec": record,
        "ShardOrderEntry": named_tuple,
        "TensorMeta": named_tuple,
    },
    "torch.distributed.tensor.placement_types": {
        "Partial": _placement,
        "Replicate": _replicate,
        "Shard": _placement,
        "_StridedShard": _placement,
    },
    "torch.distributed.device_mesh": {"DeviceMesh": _mesh},
    "torch.distributed._mesh_layout": {"_FlatLayout": record, "_MeshLayout": record},
    "torch.distributed._pycute.layout": {"Layout": record},
    "torch.distributed._shard.sharded_tensor.api": {"ShardedTensor.ProcessGroupState": record},
    "torch.distributed._shard.sharded_tensor.metadata": {
        "MEM_FORMAT_ENCODING": _memory_format,
        "ShardedTensorMetadata": record,
        "TensorProperties": _properties,
    },
    "torch.distributed._shard.sharded_tensor.shard": {"Shard": record},
    "torch.distributed._shard.metadata": {"ShardMetadata": record},
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": {"ChunkShardingSpec": record},
    "torch.distributed._shard.sharding_spec.api": {"EnumerableShardingSpec": record},
    "torch.distributed.remote_device": {"_remote_device": record},
}

#: The functions: module, name, and the checked function that runs in place of the named one.
FUNCTIONS: Globals = {
    "torch.serialization": {"_get_layout": _layout},
}
