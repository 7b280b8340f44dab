"""Which globals a pickle from the network may name.

torch keeps a list of what its own weights-only loader accepts; ours starts from it and adds what training states are
made of besides weights. Classes of the user's own are added with ``safe_globals=[...]``; ``trust_pickle=True`` lifts
the list.
"""

from __future__ import annotations

import _compat_pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .arguments import boolean, several, shown
from .errors import InvalidArgument, UnsafePickle

_BUILTINS = (
    "bool bytearray bytes complex dict enumerate float frozenset int list object range reversed set slice str tuple "
    "zip Ellipsis NotImplemented"
)

#: ``module: names`` beyond torch's list. Constructors of values only: nothing here opens, runs or imports anything.
_EXTRA: dict[str, str] = {
    "builtins": _BUILTINS,
    "_codecs": "encode",
    "collections": "Counter ChainMap OrderedDict defaultdict deque",
    "copyreg": "_reconstructor __newobj__ __newobj_ex__",
    "datetime": "date datetime time timedelta timezone tzinfo",
    "decimal": "Decimal",
    "enum": "Enum Flag IntEnum IntFlag StrEnum",
    "fractions": "Fraction",
    "pathlib": "Path PosixPath PurePath PurePosixPath",
    "types": "SimpleNamespace",
    "uuid": "UUID SafeUUID",
    "_io": "BytesIO StringIO",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "numpy.random._pickle": "__randomstate_ctor __generator_ctor __bit_generator_ctor",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64 PCG64DXSM",
    "numpy.random._philox": "Philox",
    "numpy.random._sfc64": "SFC64",
    "torch": "Size device dtype Generator Tensor layout memory_format BoolStorage",
    "torch._C": "Generator",
    "torch._utils": (
        "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state "
        "_rebuild_sparse_tensor _rebuild_sparse_csr_tensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage "
        "_rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor _rebuild_xla_tensor _rebuild_qtensor "
        "_rebuild_wrapper_subclass _set_obj_state"
    ),
    "torch._tensor": "_rebuild_from_type_v2 _rebuild_from_type",
    "torch.serialization": "_get_layout",
    "torch.storage": "TypedStorage UntypedStorage",
    "torch.nn.parameter": "Buffer Parameter UninitializedBuffer UninitializedParameter",
    "torch._prims_common": "make_contiguous_strides_for",
    "torch.distributed.tensor": "DTensor Partial Replicate Shard",
    "torch.distributed.tensor._api": "DTensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta ShardOrderEntry",
    "torch.distributed.tensor.placement_types": "Partial Placement Replicate Shard _MaskPartial _StridedShard",
    "torch.distributed.device_mesh": "DeviceMesh _MeshLayout _MeshEnv",
    "torch.distributed._mesh_layout": "_MeshLayout",
    "torch.distributed._pycute.layout": "Layout",
    "torch.distributed.distributed_c10d": "ReduceOp RedOpType",
    "torch._C._distributed_c10d": "ReduceOp RedOpType",
    "torch.distributed._shard.sharded_tensor.api": "ShardedTensor ShardedTensor.ProcessGroupState",
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardedTensorMetadata TensorProperties",
    "torch.distributed._shard.sharded_tensor.shard": "Shard",
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    "torch.distributed._shard.sharding_spec.api": "EnumerableShardingSpec PlacementSpec ShardingSpec",
    "torch.distributed.remote_device": "_remote_device",
    "torch.nested._internal.nested_tensor": "NestedTensor _rebuild_njt",
    "torch.masked.maskedtensor.core": "MaskedTensor",
    "tensorferry.tensors": "rebuild_dtensor with_grad",
}


class Allowed:
    """The globals a pickle may name.

    Args:
        extra: classes and functions to allow besides the default list
        trust: allow everything: then whoever can answer as the source can run code here
    """

    def __init__(self, extra: Iterable[Any] = (), trust: bool = False) -> None:
        """See the class.

        Raises:
            InvalidArgument: ``extra`` holds something else
        """
        self._trust = boolean("trust_pickle", trust)
        self._extra: dict[tuple[str, str], Any] = {}
        for value in several("safe_globals", extra):
            module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
            if not isinstance(module, str) or not isinstance(name, str):
                raise InvalidArgument(f"safe_globals takes classes and functions, not {shown(value)}")
            self._extra[module, name] = value

    @property
    def trusts(self) -> bool:
        """Whether everything is allowed."""
        return self._trust

    def allows(self, module: str, name: str) -> bool:
        """Whether ``module.name`` may be named."""
        return (
            self._trust
            or (module, name) in self._extra
            or name in _EXTRA.get(module, "").split()
            or (module == "torch.return_types" and not name.startswith("_"))
            or f"{module}.{name}" in _torch_allows()
        )

    def find(self, module: str, name: str, import_: Callable[[str, str], Any], leaf: object = None) -> Any:
        """The global, by the interpreter's own ``import_``; ``leaf`` is the path of what needs it, if that is known.

        Raises:
            UnsafePickle: it is not allowed
        """
        # Old pickle protocols, torchft's among them, write the names that Python 2 had.
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        if (module, name) in self._extra:
            return self._extra[module, name]
        if not self.allows(module, name):
            raise UnsafePickle(refusal(module, name, leaf))
        # torch.float32 and its like are written as globals by torch and are plain values.
        return import_(module, name)


def refusal(module: str, name: str, leaf: object = None) -> str:
    """What to tell who meets a global that is not allowed, which the leaf at path ``leaf`` needs."""
    needed = f" for {leaf[:200]!r}" if isinstance(leaf, str) and leaf else ""
    return (
        f"the checkpoint's pickle names {module}.{name}{needed}, which is not on the allow-list; if you trust it, pass "
        f"safe_globals=[{module}.{name}] to HTTPTransport or the reader on the receiving side, or trust_pickle=True to "
        "allow everything"
    )


_torch_globals: dict[str, Any] | None = None


def _torch_allows() -> dict[str, Any]:
    """Torch's own list, user additions by ``torch.serialization.add_safe_globals`` included."""
    global _torch_globals
    from torch._weights_only_unpickler import _get_allowed_globals, _get_user_allowed_globals

    if _torch_globals is None:
        _torch_globals = dict(_get_allowed_globals())
        _torch_globals |= {f"torch.{name}": v for name, v in vars(torch).items() if isinstance(v, torch.dtype)}
    user = _get_user_allowed_globals()
    return _torch_globals | user if user else _torch_globals
