"""The globals that a pickle may name by default: one table, and for each of them what a pickle may do with it.

A pickle never gets a function of this table: its name yields a :class:`Function`, which is not callable and has no
attributes to set. A class of the table stands for itself, since it can be a value (the factory of a ``defaultdict``);
its :class:`Kind` says what a pickle may do with it. Both check all arguments before any code of torch, numpy or the
standard library sees them. docs/reference/pickles.md has the review, line by line.

The table holds names. When a pickle first names a row, its object is looked up in the module that the row names, so
that a receiver imports only what it needs. A peer's text selects a row and nothing else.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import fractions
import importlib
import inspect
import io
import math
import re
import sys
import types
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.storage import TypedStorage

from ... import _rebuild

if TYPE_CHECKING:
    from ..unpickler import Unpickler


class Refused(Exception):
    """A pickle asks for something that an honest sender never writes."""


class Function:
    """Stands for a function of the table while a pickle is read."""

    __slots__ = ("name", "run")

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        """``run(unpickler, *arguments)`` checks the arguments and does what the function does."""
        self.name = name
        self.run = run

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.name} cannot be pickled or copied here")


class Kind:
    """What a pickle may do with a class of the table; an attribute that is ``None`` is not allowed.

    Attributes:
        cls: the class
        call: ``call(unpickler, *arguments)`` creates an instance like a call of the class
        new: ``new(unpickler, *arguments)`` creates one like ``cls.__new__``
        build: ``build(unpickler, instance, state)`` sets an instance's state and returns the object to use from now on
    """

    __slots__ = ("build", "call", "cls", "new")

    def __init__(
        self,
        cls: Any,
        call: Callable[..., Any] | None = None,
        new: Callable[..., Any] | None = None,
        build: Callable[..., Any] | None = None,
    ) -> None:
        self.cls = cls
        self.call = call
        self.new = new
        self.build = build


class Pending:
    """Stands for an object that is created only once its state is known, so that no object exists without its state.

    Attributes:
        memo_number: the number under which the pickle has memoized it; -1 if it has not
    """

    __slots__ = ("__weakref__", "_make", "memo_number")

    def __init__(self, make: Callable[[Unpickler, Any], Any]) -> None:
        """``make(unpickler, state)`` creates the object."""
        self._make: Callable[[Unpickler, Any], Any] | None = make
        self.memo_number = -1

    def finish(self, unpickler: Unpickler, state: Any) -> Any:
        """Creates the object with this state.

        Raises:
            Refused: it was created already
        """
        make, self._make = self._make, None
        if make is None:
            raise Refused("two states for one object")
        return make(unpickler, state)

    def __reduce__(self) -> Any:
        raise TypeError("an object without its state cannot be pickled or copied")


def require(condition: object, refused: str) -> None:
    """Raises ``Refused(refused)`` unless ``condition`` is true; ``refused`` says what the pickle has instead."""
    if not condition:
        raise Refused(refused)


def _are(kind: type, *values: Any) -> bool:
    return all([type(value) is kind for value in values])


def _sizes(values: Any, what: str) -> tuple[int, ...]:
    """Checks a shape or strides; ``what`` names it in the message. Returns a tuple of integers."""
    require(type(values) in (tuple, list, torch.Size) and len(values) <= 64, f"{what} that is not a short tuple")
    require(_are(int, *values) and all([0 <= n < 1 << 62 for n in values]), f"{what} with items that are not sizes")
    return tuple(values)


# Attributes. ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _where(cls: Any, name: str) -> str:
    """Returns where an attribute is stored: ``"slot"`` or ``"dict"``; ``""`` if it would hide a method."""
    found = inspect.getattr_static(cls, name, None)
    if inspect.ismemberdescriptor(found):
        return "slot"
    # If a newer torch has replaced a field by a property, the value from an older source has no effect.
    return "" if callable(found) or isinstance(found, classmethod | staticmethod) else "dict"


def _named(state: Any) -> dict[str, Any]:
    """Returns a state, in the forms of Python's own ``__getstate__``, as one dict of attributes."""
    require(type(state) in (dict, tuple, types.NoneType), "a state that is not a dict")
    parts = state if type(state) is tuple else (state,)
    require(len(parts) in (1, 2), "a state of more than two parts")
    named: dict[str, Any] = {}
    for part in parts:
        require(part is None or type(part) is dict, "a state that is not a dict")
        named |= part or {}
    require(_are(str, *named), "attributes whose names are not strings")
    return named


def set_attributes(instance: Any, state: Any) -> None:
    """Sets attributes from a state; refuses those that would hide a method or whose name begins with ``__``."""
    cls: Any = type(instance)
    for name, value in _named(state).items():
        require(
            len(name) <= 1000 and not name.startswith("__"), "an attribute whose name is too long or reserved by Python"
        )
        where = _where(cls, name)
        require(where, f"an attribute {name!r} that hides a method")
        if where == "slot":
            object.__setattr__(instance, name, value)
        else:
            instance.__dict__[name] = value


def _build_attributes(_: Unpickler, instance: Any, state: Any) -> Any:
    set_attributes(instance, state)
    return instance


def _record(cls: Any) -> Kind:
    """For a Python class whose instances consist of their attributes only."""
    return Kind(cls, new=lambda _: cls.__new__(cls), build=_build_attributes)


def _named_tuple(cls: Any) -> Kind:
    def new(_: Unpickler, *fields: Any) -> Any:
        return cls._make(fields)

    return Kind(cls, new=new)


# The standard library. -----------------------------------------------------------------------------------------------


def _value(cls: Any) -> Kind:
    """For a class that a pickle may only use as a value, such as the factory of a defaultdict."""
    return Kind(cls)


def _empty(cls: Any) -> Kind:
    return Kind(cls, call=lambda _: cls(), new=lambda _: cls())


def _of_items(cls: Any) -> Kind:
    def call(unpickler: Unpickler, *items: Any) -> Any:
        for values in items:
            require(
                len(items) == 1 and type(values) in (list, tuple, set),
                f"a {cls.__name__} that is not made from one list, tuple or set",
            )
            unpickler.count_copy(len(values))
            for value in values:
                unpickler.check_key(value)
        return cls(*items)

    return Kind(cls, call=call)


def _bytearray(cls: Any) -> Kind:
    def call(unpickler: Unpickler, *args: Any) -> bytearray:
        match args:
            case ():
                return bytearray()
            case (bytes(data),) if type(data) is bytes:
                unpickler.count_copy(len(data))
                return bytearray(data)
            case (str(text), "latin-1" | "latin1") if type(text) is str:
                unpickler.count_copy(len(text))
                return bytearray(text, "latin-1")
        raise Refused("a bytearray that is not made from bytes")

    return Kind(cls, call=call)


def _encode(unpickler: Unpickler, text: Any, codec: Any = "latin1") -> bytes:
    require(type(text) is str and type(codec) is str and codec in ("latin1", "latin-1"), "a codec other than Latin-1")
    unpickler.count_copy(len(text))
    return bytes(text.encode("latin-1"))


def _complex(cls: Any) -> Kind:
    def call(_: Unpickler, real: Any, imag: Any) -> complex:
        require(_are(float, real, imag), "a complex number whose parts are not floats")
        return complex(real, imag)

    return Kind(cls, call=call)


def _range(cls: Any) -> Kind:
    def call(_: Unpickler, *args: Any) -> range:
        require(_are(int, *args), "a range whose bounds are not integers")
        return range(*args)

    return Kind(cls, call=call)


def _slice(cls: Any) -> Kind:
    def call(_: Unpickler, start: Any, stop: Any, step: Any) -> slice:
        # Not nested slices: Python runs out of stack when it frees them.
        plain = (types.NoneType, bool, int, float, str)
        require(
            all([type(end) in plain or _is_numpy_scalar(end) for end in (start, stop, step)]),
            "a slice whose bounds are not plain values",
        )
        return slice(start, stop, step)

    return Kind(cls, call=call)


def _is_numpy_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _counter(cls: Any) -> Kind:
    def call(unpickler: Unpickler, *counts: Any) -> Any:
        for known in counts:
            require(len(counts) == 1 and type(known) is dict, "a Counter that is not made from one dict")
            unpickler.count_copy(len(known))
        return collections.Counter(*counts)

    return Kind(cls, call=call)


_FACTORIES = (
    list, dict, set, frozenset, tuple, int, float, str, bool, bytes, complex, collections.OrderedDict,
    collections.Counter, collections.deque,
)  # fmt: skip


def _defaultdict(cls: Any) -> Kind:
    def call(unpickler: Unpickler, factory: Any = None) -> Any:
        known = factory is None or any([factory is one for one in _FACTORIES]) or unpickler.is_user_listed(factory)
        require(known, "a defaultdict whose factory is not a type of containers, numbers or strings")
        return collections.defaultdict(factory)

    return Kind(cls, call=call)


def _deque(cls: Any) -> Kind:
    def call(unpickler: Unpickler, items: Any = (), maxlen: Any = None) -> Any:
        require(
            type(items) in (tuple, list) and (maxlen is None or type(maxlen) is int),
            "a deque that is not made from a list",
        )
        unpickler.count_copy(len(items))
        made = collections.deque(items, maxlen)
        unpickler.check_nesting(made, made)
        return made

    return Kind(cls, call=call)


def _ordered_dict(cls: Any) -> Kind:
    return Kind(cls, call=lambda _: collections.OrderedDict(), build=_build_attributes)


def _namespace(cls: Any) -> Kind:
    def build(_: Unpickler, instance: Any, state: Any) -> Any:
        require("_make" not in _named(state), "an attribute _make, as the class of a namedtuple has it")
        set_attributes(instance, state)
        return instance

    return Kind(cls, call=lambda _: types.SimpleNamespace(), build=build)


def _date_part(cls: Any, length: int) -> Kind:
    def call(unpickler: Unpickler, packed: Any, *zone: Any) -> Any:
        # Pickles of protocol 2 hold the bytes as text.
        require(
            type(packed) in (bytes, str) and len(packed) == length, f"a {cls.__name__} that is not in its packed form"
        )
        require(
            len(zone) < 2
            and all([z is None or type(z) is datetime.timezone or unpickler.is_user_listed(type(z)) for z in zone]),
            "an unknown time zone",
        )
        # The constructor hardly checks the bytes. replace() builds the object again from its fields, which are checked.
        return cls(packed, *zone).replace()

    return Kind(cls, call=call)


def _timedelta(cls: Any) -> Kind:
    def call(_: Unpickler, *args: Any) -> Any:
        require(len(args) <= 3 and _are(int, *args), "a timedelta whose parts are not integers")
        return datetime.timedelta(*args)

    return Kind(cls, call=call)


def _timezone(cls: Any) -> Kind:
    def call(_: Unpickler, offset: Any, *name: Any) -> Any:
        require(
            type(offset) is datetime.timedelta and len(name) < 2 and _are(str, *name), "a time zone without an offset"
        )
        return datetime.timezone(offset, *name)

    return Kind(cls, call=call)


_DECIMAL = re.compile(r"-?(\d{1,4300}(\.\d{0,4300})?(E[+-]?\d{1,4})?|Infinity|s?NaN\d{0,100})", re.ASCII)
_FRACTION = re.compile(r"-?\d{1,4300}(/\d{1,4300})?", re.ASCII)


def _decimal(cls: Any) -> Kind:
    def call(_: Unpickler, text: Any) -> Any:
        # Refuses 1e999999999, which a conversion to int would write out in full.
        require(type(text) is str and _DECIMAL.fullmatch(text), "a Decimal that is not a number of moderate size")
        return decimal.Decimal(text)

    return Kind(cls, call=call)


def _fraction(cls: Any) -> Kind:
    def call(_: Unpickler, *args: Any) -> Any:
        match args:
            case (str(text),) if type(text) is str and _FRACTION.fullmatch(text):
                return fractions.Fraction(text)
            case (int(), int()) if _are(int, *args) and max(abs(args[0]), abs(args[1])).bit_length() < 1 << 14:
                return fractions.Fraction(*args)
        raise Refused("a Fraction that is not a quotient of integers of moderate size")

    return Kind(cls, call=call)


def _path(cls: Any) -> Kind:
    def call(_: Unpickler, *parts: Any) -> Any:
        require(_are(str, *parts), "a path whose parts are not strings")
        return cls(*parts)

    return Kind(cls, call=call)


def _uuid(cls: Any) -> Kind:
    def build(_: Unpickler, instance: Any, state: Any) -> Any:
        named = _named(state)
        number, safe = named.get("int"), named.get("is_safe")
        require(type(number) is int and 0 <= number < 1 << 128, "a UUID that is not a number of 128 bits")
        require(type(safe) in (int, types.NoneType), "a UUID with an invalid is_safe")
        instance.__setstate__({"int": number} | ({} if safe is None else {"is_safe": safe}))
        return instance

    return Kind(cls, new=lambda _: cls.__new__(cls), build=build)


def _bytes_io(cls: Any) -> Kind:
    def build(unpickler: Unpickler, instance: Any, state: Any) -> Any:
        require(type(state) is tuple and len(state) == 3, "a BytesIO that is not bytes and a position")
        data, position, attributes = state
        require(
            type(data) is bytes and type(position) is int and not attributes, "a BytesIO whose content is not bytes"
        )
        require(0 <= position <= len(data), "a BytesIO whose position lies beyond its end")
        unpickler.count_copy(len(data))
        instance.__setstate__((data, position, None))
        return instance

    return Kind(cls, new=lambda _: io.BytesIO(), build=build)


def _string_io(cls: Any) -> Kind:
    def build(unpickler: Unpickler, instance: Any, state: Any) -> Any:
        require(type(state) is tuple and len(state) == 4, "a StringIO that is not text and a position")
        text, newline, position, attributes = state
        require(type(text) is str and type(position) is int and not attributes, "a StringIO whose content is not text")
        require(
            newline in (None, "", "\n", "\r", "\r\n") and 0 <= position <= len(text),
            "a StringIO with an invalid newline or position",
        )
        unpickler.count_copy(len(text))
        instance.__setstate__((text, newline, position, None))
        return instance

    return Kind(cls, new=lambda _: io.StringIO(), build=build)


def _newobj(unpickler: Unpickler, cls: Any, *args: Any) -> Any:
    return unpickler.instance(cls, args, {})


def _newobj_ex(unpickler: Unpickler, cls: Any, args: Any, named: Any) -> Any:
    require(type(args) is tuple and type(named) is dict, "arguments that are not a tuple and a dict")
    return unpickler.instance(cls, args, named)


# torch. --------------------------------------------------------------------------------------------------------------


def _size(cls: Any) -> Kind:
    def call(unpickler: Unpickler, values: Any = ()) -> torch.Size:
        require(type(values) in (tuple, list) and _are(int, *values), "a Size whose items are not integers")
        unpickler.count_copy(len(values))
        return torch.Size(values)

    return Kind(cls, call=call)


def _device(cls: Any) -> Kind:
    def call(_: Unpickler, kind: Any, *index: Any) -> torch.device:
        require(type(kind) is str and len(kind) < 100 and len(index) < 2 and _are(int, *index), "an invalid device")
        return torch.device(kind, *index)

    return Kind(cls, call=call)


def _generator(cls: Any) -> Kind:
    def call(_: Unpickler, device: Any) -> torch.Generator:
        require(type(device) is torch.device, "a Generator without a device")
        return torch.Generator(device)

    def build(unpickler: Unpickler, instance: Any, state: Any) -> Any:
        require(
            type(state) is tuple and len(state) == 3, "a Generator whose state is not a seed, an offset and a tensor"
        )
        seed, offset, tensor = state
        require(
            type(seed) is int and (offset is None or type(offset) is int), "a Generator whose seed is not an integer"
        )
        require(_plain(tensor) and tensor.dtype is torch.uint8, "a Generator whose state is not a tensor of bytes")
        unpickler.count_tensor(tensor, 1)
        instance.__setstate__(state)
        return instance

    return Kind(cls, call=call, build=build)


def _layout(_: Unpickler, name: Any) -> Any:
    require(type(name) is str, "a layout whose name is not a string")
    return torch.serialization._get_layout(name)


def _no_hooks(hooks: Any) -> None:
    require(hooks is None or (type(hooks) is collections.OrderedDict and not hooks), "hooks on a tensor")


def _metadata(values: tuple[Any, ...], dtype: torch.dtype) -> None:
    for known in values:
        bits = type(known) is dict and known.keys() <= {"conj", "neg"} and _are(bool, *known.values())
        require(len(values) == 1 and (known is None or bits), "tensor metadata other than the conj and neg bits")
        # torch's kernels do not expect these bits on other dtypes.
        require(not (known or {}).get("conj") or dtype.is_complex, "a conj bit on numbers that are not complex")
        require(
            not (known or {}).get("neg") or dtype.is_complex or dtype in _OF_COMPLEX,
            "a neg bit on a dtype that cannot have one",
        )


#: Real dtypes that can have a neg bit: those of the imaginary part of a conjugated tensor.
_OF_COMPLEX = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

_QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def _not_quantised(dtype: torch.dtype) -> None:
    """Refuses a quantised dtype where no scales are given: torch would read scales that are not there."""
    require(dtype not in _QUANTISED, "a quantised tensor without its scales")


def _within(storage: Any, offset: Any, size: Any, stride: Any, bits: int) -> None:
    """Refuses a tensor that reaches beyond its storage: torch would enlarge the storage, or read beyond its end."""
    require(type(storage) is TypedStorage, "a tensor without a storage")
    shape, steps = _sizes(size, "a shape"), _sizes(stride, "strides")
    require(len(shape) == len(steps), "strides that do not belong to the shape")
    require(type(offset) is int and 0 <= offset < 1 << 62, "an invalid offset")
    require(math.prod([n or 1 for n in shape]) < 1 << 62, "a shape that is too large")
    nbytes = storage._untyped_storage.nbytes()
    reach = 0 if 0 in shape else 1 + sum([(n - 1) * step for n, step in zip(shape, steps, strict=True)])
    require((offset + reach) * bits <= nbytes * 8, "a tensor that reaches beyond its storage")


def _bits(dtype: torch.dtype) -> int:
    return _PACKED.get(dtype) or int(dtype.itemsize) * 8


#: Bits of an element of the quantised dtypes with several elements in a byte.
_PACKED = {torch.quint4x2: 4, torch.quint2x4: 2}


def _rebuild_tensor(unpickler: Unpickler, storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
    return _rebuild_tensor_v2(unpickler, storage, offset, size, stride, False, None)


def _rebuild_tensor_v2(
    _: Unpickler, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, *metadata: Any
) -> Tensor:
    require(type(storage) is TypedStorage, "a tensor without a storage")
    _not_quantised(storage.dtype)
    _within(storage, offset, size, stride, storage.dtype.itemsize * 8)
    require(type(grad) is bool, "a requires_grad that is not a bool")
    _no_hooks(hooks)
    _metadata(metadata, storage.dtype)
    return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, grad, hooks, *metadata)


def _rebuild_tensor_v3(
    _: Unpickler, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *metadata: Any
) -> Tensor:
    require(type(dtype) is torch.dtype, "a tensor without a dtype")
    _not_quantised(dtype)
    _within(storage, offset, size, stride, dtype.itemsize * 8)
    require(type(grad) is bool, "a requires_grad that is not a bool")
    _no_hooks(hooks)
    _metadata(metadata, dtype)
    return torch._utils._rebuild_tensor_v3(storage, offset, size, stride, grad, hooks, dtype, *metadata)


def _rebuild_qtensor(
    unpickler: Unpickler, storage: Any, offset: Any, size: Any, stride: Any, how: Any, grad: Any, hooks: Any
) -> Tensor:
    require(type(storage) is TypedStorage, "a tensor without a storage")
    _within(storage, offset, size, stride, _bits(storage.dtype))
    # torch first creates a tensor with as many elements.
    require(
        math.prod(size) * _bits(storage.dtype) <= 8 * storage._untyped_storage.nbytes(),
        "a quantised tensor whose elements share memory",
    )
    require(type(grad) is bool and type(how) is tuple and how, "a quantised tensor without its scales")
    _no_hooks(hooks)
    match how:
        case (torch.per_tensor_affine, float(), int()):
            pass
        case (torch.per_channel_affine | torch.per_channel_affine_float_qparams, scales, zeros, int(axis)):
            require(
                _plain(scales) and _plain(zeros) and 0 <= axis < len(size), "scales or zero points that are not tensors"
            )
            require(scales.dim() == zeros.dim() == 1, "scales or zero points that are not one-dimensional")
            require(scales.numel() == zeros.numel() == size[axis], "scales for another number of channels")
            require(scales.is_floating_point() and not zeros.is_complex(), "scales that are not floating-point numbers")
            # torch converts the elements of both to eight bytes each.
            unpickler.count_tensor(scales, 8)
            unpickler.count_tensor(zeros, 8)
        case _:
            raise Refused("a quantised tensor with an unknown scheme")
    unpickler.count_checks(math.prod(size) >> 6)
    return torch._utils._rebuild_qtensor(storage, offset, size, stride, how, grad, hooks)


def _rebuild_parameter(_: Unpickler, data: Any, grad: Any, hooks: Any) -> Tensor:
    require(isinstance(data, Tensor) and type(grad) is bool, "a Parameter without a tensor")
    _no_hooks(hooks)
    return Parameter(data, grad)


def _rebuild_parameter_with_state(unpickler: Unpickler, data: Any, grad: Any, hooks: Any, state: Any) -> Tensor:
    made = _rebuild_parameter(unpickler, data, grad, hooks)
    set_attributes(made, state)
    return made


def _plain(value: Any) -> bool:
    """Whether ``value`` is a dense tensor of numbers in host memory."""
    return (
        type(value) in (Tensor, Parameter)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_nested
        and not value.is_quantized
    )


def _indices(values: Any) -> bool:
    return _plain(values) and values.dtype in (torch.int64, torch.int32)


def _dense(values: Any) -> bool:
    return type(values) in (Tensor, Parameter) and values.layout is torch.strided and not values.is_nested


def _rebuild_sparse_tensor(unpickler: Unpickler, layout: Any, data: Any) -> Tensor:
    require(
        type(layout) is torch.layout and type(data) is tuple and len(data) in (3, 4),
        "a sparse tensor with invalid parts",
    )
    if layout is torch.sparse_coo:
        indices, values, size, *coalesced = data
        require(_indices(indices) and _dense(values), "a sparse tensor whose indices or values are not dense tensors")
        require(
            values.device.type == "cpu" and not values.is_quantized,
            "a sparse tensor whose values are not numbers in host memory",
        )
        require(
            all([c is None or type(c) is bool for c in coalesced]), "a sparse tensor whose is_coalesced is not a bool"
        )
        unpickler.count_checks(indices.numel() >> 6)
        # Private indices: those of the pickle can share memory with another tensor, to which the user may write.
        return torch.sparse_coo_tensor(
            unpickler.private_copy(indices),
            values,
            _sizes(size, "a shape"),
            check_invariants=True,
            is_coalesced=coalesced[0] if coalesced else None,
        )
    require(len(data) == 4, "a sparse tensor that does not have four parts")
    compressed, plain, values, size = data
    require(
        _indices(compressed) and _indices(plain) and _dense(values),
        "a sparse tensor whose indices or values are not dense tensors",
    )
    require(
        values.device.type == "cpu" and not values.is_quantized,
        "a sparse tensor whose values are not numbers in host memory",
    )
    unpickler.count_checks((compressed.numel() + plain.numel()) >> 6)
    return torch.sparse_compressed_tensor(
        unpickler.private_copy(compressed),
        unpickler.private_copy(plain),
        values,
        _sizes(size, "a shape"),
        layout=layout,
        check_invariants=True,
    )


def _rebuild_nested_tensor(unpickler: Unpickler, buffer: Any, sizes: Any, strides: Any, offsets: Any) -> Tensor:
    require(
        _plain(buffer) and buffer.dim() == 1 and buffer.is_contiguous(), "a nested tensor without a contiguous buffer"
    )
    shapes = all([_plain(part) and part.dtype is torch.int64 for part in (sizes, strides, offsets)])
    require(shapes and sizes.dim() == 2 and sizes.shape == strides.shape, "a nested tensor without valid shapes")
    require(offsets.shape == sizes.shape[:1], "a nested tensor without an offset for each shape")
    unpickler.count_checks(len(sizes) + sizes.numel())
    # Private shapes, for the same reason as private indices.
    sizes, strides, offsets = map(unpickler.private_copy, (sizes, strides, offsets))
    for shape, steps, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        require(min([offset, *shape, *steps]) >= 0, "a nested tensor with negative sizes, strides or offsets")
        reach = 0 if 0 in shape else 1 + sum([(n - 1) * step for n, step in zip(shape, steps, strict=True)])
        require(offset + reach <= buffer.numel(), "a nested tensor that reaches beyond its buffer")
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


_JAGGED = ("_values", "_offsets", "_lengths", "_ragged_idx", "_metadata_cache")


def _rebuild_njt(unpickler: Unpickler, parts: Any) -> Tensor:
    require(type(parts) is dict and _are(str, *parts), "a jagged tensor whose parts are not a dict")
    known = {"values", "offsets", "lengths", "_ragged_idx", "_metadata_cache", "requires_grad"}
    require(
        parts.keys() <= known and {"values", "offsets"} <= parts.keys(), "a jagged tensor with unknown or missing parts"
    )
    values, offsets, lengths = parts["values"], parts["offsets"], parts.get("lengths")
    ragged, cached = parts.get("_ragged_idx", 1), parts.get("_metadata_cache") or {}
    require(
        _dense(values) and _indices(offsets) and offsets.dim() == 1 and len(offsets) > 0,
        "a jagged tensor without valid values and offsets",
    )
    require(type(ragged) is int and 0 < ragged <= values.dim(), "a jagged tensor with an invalid ragged dimension")
    require(type(parts.get("requires_grad", False)) is bool, "a requires_grad that is not a bool")
    require(type(cached) is dict and _are(str, *cached), "a jagged tensor whose cache has keys that are not strings")
    require(
        all([type(one) is int or _plain(one) for one in cached.values()]),
        "a jagged tensor whose cache has values that are not sizes",
    )
    unpickler.count_checks(len(offsets) >> 6)
    # private_copy() returns the same copy for the same offsets: jagged tensors that share them belong together.
    offsets = unpickler.private_copy(offsets)
    rows, end = offsets.diff(), values.shape[ragged - 1]
    require(
        bool((rows >= 0).all()) and offsets[0] >= 0 and offsets[-1] <= end,
        "a jagged tensor with rows beyond its values",
    )
    if lengths is not None:
        require(_indices(lengths) and lengths.shape == rows.shape, "a jagged tensor with invalid lengths")
        lengths = unpickler.private_copy(lengths)
        require(
            bool((lengths >= 0).all()) and bool((offsets[:-1] + lengths <= end).all()),
            "a jagged tensor with rows beyond its values",
        )
    module = importlib.import_module("torch.nested._internal.nested_tensor")
    return module._rebuild_njt({**parts, "offsets": offsets, "lengths": lengths})


def _rebuild_meta_tensor(_: Unpickler, dtype: Any, size: Any, stride: Any, grad: Any) -> Tensor:
    require(type(dtype) is torch.dtype and type(grad) is bool, "a tensor without a dtype")
    _not_quantised(dtype)
    shape, steps = _sizes(size, "a shape"), _sizes(stride, "strides")
    return torch._utils._rebuild_meta_tensor_no_storage(dtype, shape, steps, grad)


def _rebuild_on_device(unpickler: Unpickler, data: Any, dtype: Any, device: Any, grad: Any) -> Tensor:
    require(_plain(data) and type(dtype) is torch.dtype and type(grad) is bool, "a tensor without data or a dtype")
    require(type(device) in (str, torch.device), "an invalid device")
    _not_quantised(dtype)
    unpickler.count_tensor(data, dtype.itemsize)
    return torch._utils._rebuild_device_tensor_from_cpu_tensor(data, dtype, device, grad)


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
    shape, steps = _sizes(size, "a shape"), _sizes(stride, "strides")
    return torch._utils._rebuild_wrapper_subclass(cls, dtype, shape, steps, offset, layout, device, grad)


def _is_wrapper(cls: Any) -> bool:
    return id(cls) in _kinds and cls.__name__ in _WRAPPED


#: The parts of each tensor class without memory of its own: names of attributes, and the name of the class of each.
_WRAPPED: dict[str, dict[str, str]] = {
    "DTensor": {"_local_tensor": "Tensor", "_spec": "DTensorSpec"},
    "MaskedTensor": {"_masked_data": "Tensor", "_masked_mask": "Tensor"},
    "ShardedTensor": {},
}


def _is_a(value: Any, name: str) -> bool:
    if name == "Tensor":
        return isinstance(value, Tensor)
    kind = _kinds.get(id(type(value)))
    return kind is not None and kind.cls.__name__ == name


def _rebuild_from_type(unpickler: Unpickler, rebuild: Any, cls: Any, args: Any, state: Any) -> Tensor:
    """Does what ``torch._tensor._rebuild_from_type_v2`` does."""
    require(type(rebuild) is Function and rebuild.run in _REBUILDING, "a function that does not rebuild tensors")
    require(type(args) is tuple, "arguments that are not a tuple")
    made: Tensor = rebuild.run(unpickler, *args)
    if id(cls) not in _kinds and unpickler.is_user_listed(cls):
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
    if rebuild.run is _rebuild_wrapper:
        require(type(made) is cls, "a wrapper rebuilt as another class")
        if cls.__name__ == "ShardedTensor":
            _set_sharded(made, state, unpickler.allowed.detaches)
            return made
        named = _named(state)
        for name, kind in _WRAPPED[cls.__name__].items():
            require(_is_a(named.get(name), kind), f"a {cls.__name__} without its {name}")
        set_attributes(made, state)
        return made
    if rebuild.run is _rebuild_njt:
        require(type(made) is cls, "a jagged tensor rebuilt as another class")
        # The constructor has set and checked these.
        set_attributes(made, {name: value for name, value in _named(state).items() if name not in _JAGGED})
        return made
    require(type(made) is cls, "a class other than that of the rebuilt tensor")
    set_attributes(made, state)
    return made


def _set_sharded(made: Any, state: Any, detaches: bool) -> None:
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
        _dense(local) and _is_a(spec, "DTensorSpec") and type(grad) is bool,
        "a DTensor that is not a dense tensor, a DTensorSpec and a bool",
    )
    return _rebuild.rebuild_dtensor(local, spec, grad)


def _uninitialized(cls: Any) -> Kind:
    def call(_: Unpickler, grad: Any) -> Any:
        require(type(grad) is bool, "a requires_grad that is not a bool")
        return cls(grad)

    return Kind(cls, call=call)


def _tensor(cls: Any) -> Kind:
    return Kind(cls, build=_build_attributes)


def _structseq(cls: Any) -> Kind:
    def call(_: Unpickler, fields: Any, named: Any) -> Any:
        require(type(fields) is tuple and type(named) is dict and not named, f"a {cls.__name__} with unexpected fields")
        # Not nested in one another: Python frees such tuples recursively.
        plain = (types.NoneType, bool, int, float, complex)
        require(
            all([type(f) in plain or isinstance(f, Tensor) for f in fields]),
            f"a {cls.__name__} whose fields are neither tensors nor numbers",
        )
        return cls(fields)

    return Kind(cls, call=call)


def _placement(cls: Any) -> Kind:
    """For ``Shard``, ``Partial`` and the like, created by their constructors: some are C++ objects that need it."""

    def make(_: Unpickler, state: Any) -> Any:
        fields = _named(state)
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

    return Kind(cls, new=lambda _: Pending(make))


def _replicate(cls: Any) -> Kind:
    def build(_: Unpickler, instance: Any, state: Any) -> Any:
        require(not _named(state), "a placement with unexpected fields")
        return instance

    return Kind(cls, new=lambda _: cls(), build=build)


def _mesh(cls: Any) -> Kind:
    def build(_: Unpickler, instance: Any, state: Any) -> Any:
        named = _named(state)
        names = named.get("_dim_group_names", [])
        require(
            type(names) is list and _are(str, *names) and len(names) < 100, "a mesh whose group names are not strings"
        )
        set_attributes(instance, state)
        if hasattr(cls, "__setstate__"):
            # It looks up groups with these names in this process. It creates no group and contacts no other rank.
            instance.__setstate__({})
        return instance

    # Not by its constructor, which contacts the other ranks.
    return Kind(cls, new=lambda _: cls.__new__(cls), build=build)


def _memory_format(cls: Any) -> Kind:
    def call(_: Unpickler, number: Any) -> Any:
        require(type(number) is int, "a memory format that is not a number")
        return cls(number)

    return Kind(cls, call=call)


def _properties(cls: Any) -> Kind:
    def build(_: Unpickler, instance: Any, state: Any) -> Any:
        require(type(state) is tuple and len(state) in (5, 6), "a number of tensor properties other than five or six")
        instance.__setstate__(state)
        return instance

    return Kind(cls, new=lambda _: cls.__new__(cls), build=build)


# numpy. --------------------------------------------------------------------------------------------------------------

_DTYPE = re.compile(r"[biufcSUVmMO?]\d{0,9}", re.ASCII)


def _dtype(cls: Any) -> Kind:
    def call(_: Unpickler, text: Any, align: Any = False, copy: Any = False) -> Any:
        # The text of a dtype such as "V8" does not say what its parts are: those come with the state.
        require(type(text) is str and _DTYPE.fullmatch(text), "a dtype of an unknown kind")
        require(align in (False, 0, True) and copy in (False, 0, True), "a dtype with unexpected arguments")
        return Pending(lambda unpickler, state: _make_dtype(unpickler, text, state))

    return Kind(cls, call=call)


#: How deep dtypes may be nested: numpy walks them recursively.
_DEEPEST_DTYPE = 32


def _shallow(unpickler: Unpickler, dtype: Any) -> None:
    """Refuses a dtype of so many nested dtypes that numpy would take too long or too much stack."""
    todo = [(dtype, 0)]
    while todo:
        item, depth = todo.pop()
        require(depth < _DEEPEST_DTYPE, "a dtype that is nested too deep")
        unpickler.count_checks(1)
        parts = [item.base] if item.subdtype else [part[0] for part in (item.fields or {}).values()]
        todo += [(part, depth + 1) for part in parts]


def _make_dtype(unpickler: Unpickler, text: str, state: Any) -> Any:
    """Creates the dtype that a state describes, by numpy's public constructor, which only makes valid ones."""
    import numpy as np

    require(type(state) is tuple and len(state) in (8, 9) and state[0] in (3, 4), "a dtype of an unknown version")
    order, sub, names, fields, itemsize, alignment = state[1:7]
    require(type(order) is str and order in "<>=|" and _are(int, itemsize, alignment), "a dtype without a byte order")
    if sub is not None:
        require(
            type(sub) is tuple and len(sub) == 2 and isinstance(sub[0], np.dtype),
            "a dtype whose elements have no dtype",
        )
        _shallow(unpickler, sub[0])
        made = np.dtype((sub[0], _sizes(sub[1], "a shape")))
    elif names is not None:
        require(type(names) is tuple and _are(str, *names) and type(fields) is dict, "a dtype with invalid fields")
        parts = [fields.get(name) for name in names]
        for part in parts:
            whole = type(part) is tuple and len(part) in (2, 3)
            require(whole and isinstance(part[0], np.dtype) and type(part[1]) is int, "a dtype with invalid fields")
        for part in parts:
            _shallow(unpickler, part[0])
        known: dict[str, Any] = {
            "names": list(names),
            "formats": [p[0] for p in parts],
            "offsets": [p[1] for p in parts],
        }
        if any(len(part) == 3 for part in parts):
            known["titles"] = [part[2] if len(part) == 3 else None for part in parts]
            require(all([t is None or type(t) is str for t in known["titles"]]), "a dtype whose titles are not strings")
        require(0 < itemsize < 1 << 31, "a dtype with an invalid size")
        aligned = alignment > 1
        of: Any = np.dtype
        made = of({**known, "itemsize": itemsize}, align=aligned)
    elif text[0] in "mM" and len(state) == 9:
        match state[8]:
            case (None | {}, (bytes(unit), int(step), 1, *_)) if (
                unit.isalpha() and len(unit) < 8 and 0 < step < 1 << 31
            ):
                made = np.dtype(text if unit == b"generic" else f"{text}[{step}{unit.decode()}]")
            case _:
                raise Refused("a dtype of times with an invalid unit")
    else:
        # For strings, the text has the length in characters; itemsize, which is not needed, has it in bytes.
        made = np.dtype(text)
    require(
        made.hasobject is text.startswith("O") or names is not None or sub is not None,
        "a dtype whose kind and state contradict each other",
    )
    if order in "<>" and made.names is None and made.subdtype is None:
        made = made.newbyteorder(order)
    return made


def _reconstruct(_: Unpickler, cls: Any, shape: Any, kind: Any) -> Any:
    import numpy as np

    require(
        cls is np.ndarray and shape == (0,) and _are(tuple, shape) and kind in (b"b", "b"),
        "an array of an unexpected kind",
    )
    return Pending(_make_array)


def _make_array(unpickler: Unpickler, state: Any) -> Any:
    import numpy as np

    require(type(state) is tuple and len(state) == 5 and state[0] == 1, "an array of an unknown version")
    _, shape, dtype, fortran, data = state
    sizes = _sizes(shape, "a shape")
    require(isinstance(dtype, np.dtype) and fortran in (False, True), "an array without a dtype")
    count = math.prod(sizes)
    made = np.ndarray((0,), np.int8)
    if dtype.hasobject:
        # Objects have to come as a list: as bytes they would be addresses, which a pickle must not choose.
        require(
            dtype == np.dtype(object) and type(data) is list and len(data) == count,
            "an array of objects that are not in a list of the right length",
        )
        unpickler.count_copy(count)
        # numpy frees nested ones recursively.
        nested = [type(item) is np.ndarray and item.dtype.hasobject for item in data]
        require(not any(nested), "an array of objects in an array of objects")
    else:
        require(
            type(data) is bytes and len(data) == count * dtype.itemsize,
            "an array with more or fewer bytes than its shape needs",
        )
        require(dtype.itemsize or not count, "an array of elements without bytes")
        unpickler.count_copy(len(data))
    of: Any = made
    of.__setstate__((1, sizes, dtype, bool(fortran), data))
    return made


def _scalar(_: Unpickler, dtype: Any, data: Any) -> Any:
    import numpy as np

    require(isinstance(dtype, np.dtype) and not dtype.hasobject, "a number without a dtype")
    require(
        type(data) is bytes and len(data) == dtype.itemsize and data, "a number with more or fewer bytes than its dtype"
    )
    return np.frombuffer(data, dtype).copy()[0]


def _words(value: Any, dtype: str, *count: int) -> bool:
    import numpy as np

    return type(value) is np.ndarray and value.dtype == np.dtype(dtype) and value.shape == count


def _bit_state(name: str, state: Any) -> Any:
    """Checks the state of numpy's bit generator ``name`` and returns it.

    With a wrong position in it, numpy would read beyond its arrays.
    """
    require(
        type(state) is dict and _are(str, *state) and state.get("bit_generator") == name,
        "a random generator of an unexpected kind",
    )
    inner = state.get("state")
    require(type(inner) is dict and _are(str, *inner), "a random generator without a state")

    def number(of: dict[str, Any], key: str, end: int) -> bool:
        return type(of.get(key)) is int and 0 <= of[key] < end

    if name == "MT19937":
        require(
            _words(inner.get("key"), "uint32", 624) and number(inner, "pos", 625), "an MT19937 with an invalid state"
        )
        return state
    require(
        number(state, "has_uint32", 2) and number(state, "uinteger", 1 << 32),
        "a random generator with an invalid state",
    )
    if name in ("PCG64", "PCG64DXSM"):
        require(number(inner, "state", 1 << 128) and number(inner, "inc", 1 << 128), "a PCG64 with an invalid state")
    elif name == "Philox":
        require(
            _words(inner.get("counter"), "uint64", 4) and _words(inner.get("key"), "uint64", 2),
            "a Philox with an invalid state",
        )
        require(
            _words(state.get("buffer"), "uint64", 4) and number(state, "buffer_pos", 5),
            "a Philox with an invalid state",
        )
    else:
        require(_words(inner.get("state"), "uint64", 4), "an SFC64 with an invalid state")
    return state


_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def _bit_generator(cls: Any) -> Kind:
    def build(_: Unpickler, instance: Any, state: Any) -> Any:
        import numpy as np

        if type(state) is dict:
            instance.state = _bit_state(cls.__name__, state)
            return instance
        require(type(state) is tuple and len(state) == 2, "a random generator without a state")
        known, seed = state
        require(
            seed is None or type(seed) is np.random.SeedSequence, "a random generator whose seed is not a SeedSequence"
        )
        _bit_state(cls.__name__, known)
        instance.__setstate__((known, seed))
        return instance

    return Kind(cls, build=build)


def _new_bit_generator(_: Unpickler, name: Any = "MT19937") -> Any:
    import numpy as np

    made = {one: getattr(np.random, one) for one in _GENERATORS}
    found: Any = made.get(name) if type(name) is str else name
    require(any([found is one for one in made.values()]), "a random generator of an unexpected kind")
    find("numpy.random", found.__name__)
    return found(0)


def _ready_bit_generator(unpickler: Unpickler, given: Any) -> Any:
    import numpy as np

    if type(given) is str:
        return _new_bit_generator(unpickler, given)
    require(type(given) in [getattr(np.random, one) for one in _GENERATORS], "a random generator of an unexpected kind")
    return given


def _new_generator(unpickler: Unpickler, given: Any = "MT19937", *_: Any) -> Any:
    import numpy as np

    find("numpy.random", "Generator")
    return np.random.Generator(_ready_bit_generator(unpickler, given))


def _new_random_state(unpickler: Unpickler, given: Any = "MT19937", *_: Any) -> Any:
    import numpy as np

    ready = _ready_bit_generator(unpickler, given)
    require(type(ready).__name__ == "MT19937", "a RandomState over a generator other than MT19937")
    find("numpy.random", "RandomState")
    return np.random.RandomState(ready)


def _generator_state(cls: Any) -> Kind:
    """For ``numpy.random.Generator`` and ``RandomState``, whose state numpy before version 2 pickles separately."""

    def build(_: Unpickler, instance: Any, state: Any) -> Any:
        if state is None:
            return instance
        require(type(state) is dict, "a random generator without a state")
        if cls.__name__ == "Generator":
            instance.bit_generator.state = _bit_state(type(instance.bit_generator).__name__, state)
            return instance
        _bit_state("MT19937", state)
        require(
            type(state.get("has_gauss", 0)) is int and type(state.get("gauss", 0.0)) is float,
            "a RandomState with an invalid state",
        )
        instance.set_state(state)
        return instance

    return Kind(cls, build=build)


def _new_seed_sequence(_: Unpickler, cls: Any, checksum: Any, state: Any) -> Any:
    import numpy as np

    require(
        cls is np.random.SeedSequence and type(checksum) is int and state is None,
        "a SeedSequence of an unexpected kind",
    )
    return Pending(_make_seed_sequence)


def _make_seed_sequence(unpickler: Unpickler, state: Any) -> Any:
    """Creates a SeedSequence from its numbers; numpy computes the pool from them."""
    import numpy as np

    require(type(state) is tuple and len(state) in (5, 6), "a SeedSequence with an invalid state")
    entropy, spawned, pool, size, key = state[:5]

    def numbers(values: Any) -> bool:
        kind = type(values)
        if kind is int:
            return bool(0 <= values < 1 << 4096)
        if kind is np.ndarray:
            return bool(values.ndim == 1 and values.dtype.kind in "ui" and len(values) <= 4096)
        return kind in (list, tuple) and len(values) <= 1024 and all([type(n) is int and numbers(n) for n in values])

    require(entropy is None or numbers(entropy), "a SeedSequence whose entropy is not numbers")
    require(
        type(key) is tuple and numbers(key) and type(spawned) is int and 0 <= spawned < 1 << 32,
        "a SeedSequence with an invalid spawn key",
    )
    require(
        type(size) is int and 4 <= size <= 1024 and _words(pool, "uint32", size), "a SeedSequence with an invalid pool"
    )
    unpickler.count_checks(size * size)
    return np.random.SeedSequence(entropy, spawn_key=key, pool_size=size, n_children_spawned=spawned)


# The table. ----------------------------------------------------------------------------------------------------------

#: The classes: module, name, and the function that creates the ``Kind`` of the class.
_CLASSES: dict[str, dict[str, Callable[[Any], Kind]]] = {
    "builtins": {
        **dict.fromkeys(("bool", "float", "int", "str"), _value),
        **dict.fromkeys(("bytes", "dict", "list", "object", "tuple"), _empty),
        **dict.fromkeys(("frozenset", "set"), _of_items),
        "bytearray": _bytearray,
        "complex": _complex,
        "range": _range,
        "slice": _slice,
    },
    "collections": {
        "Counter": _counter,
        "OrderedDict": _ordered_dict,
        "defaultdict": _defaultdict,
        "deque": _deque,
    },
    "datetime": {
        "date": lambda cls: _date_part(cls, 4),
        "datetime": lambda cls: _date_part(cls, 10),
        "time": lambda cls: _date_part(cls, 6),
        "timedelta": _timedelta,
        "timezone": _timezone,
    },
    "decimal": {"Decimal": _decimal},
    "fractions": {"Fraction": _fraction},
    "pathlib": dict.fromkeys(("Path", "PosixPath", "PurePath", "PurePosixPath"), _path),
    "types": {"SimpleNamespace": _namespace},
    "uuid": {"UUID": _uuid},
    "_io": {"BytesIO": _bytes_io, "StringIO": _string_io},
    "numpy": {"dtype": _dtype, "ndarray": _value},
    "numpy.random": {
        **dict.fromkeys(_GENERATORS, _bit_generator),
        **dict.fromkeys(("Generator", "RandomState"), _generator_state),
        "SeedSequence": _value,
    },
    "torch": {"Size": _size, "device": _device, "Generator": _generator, "Tensor": _tensor},
    "torch.storage": {"TypedStorage": _value, "UntypedStorage": _value},
    "torch.nn.parameter": {
        "Parameter": _tensor,
        "UninitializedBuffer": _uninitialized,
        "UninitializedParameter": _uninitialized,
    },
    "torch.distributed.tensor": {"DTensor": _value},
    "torch.distributed.tensor._dtensor_spec": {
        "DTensorSpec": _record,
        "ShardOrderEntry": _named_tuple,
        "TensorMeta": _named_tuple,
    },
    "torch.distributed.tensor.placement_types": {
        "Partial": _placement,
        "Replicate": _replicate,
        "Shard": _placement,
        "_StridedShard": _placement,
    },
    "torch.distributed.device_mesh": {"DeviceMesh": _mesh},
    "torch.distributed._mesh_layout": {"_FlatLayout": _record, "_MeshLayout": _record},
    "torch.distributed._pycute.layout": {"Layout": _record},
    "torch.distributed._shard.sharded_tensor.api": {
        "ShardedTensor": _value,
        "ShardedTensor.ProcessGroupState": _record,
    },
    "torch.distributed._shard.sharded_tensor.metadata": {
        "MEM_FORMAT_ENCODING": _memory_format,
        "ShardedTensorMetadata": _record,
        "TensorProperties": _properties,
    },
    "torch.distributed._shard.sharded_tensor.shard": {"Shard": _record},
    "torch.distributed._shard.metadata": {"ShardMetadata": _record},
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": {"ChunkShardingSpec": _record},
    "torch.distributed._shard.sharding_spec.api": {"EnumerableShardingSpec": _record},
    "torch.distributed.remote_device": {"_remote_device": _record},
    "torch.nested._internal.nested_tensor": {"NestedTensor": _value},
    "torch.masked.maskedtensor.core": {"MaskedTensor": _value},
    "torch._dynamo.decorators": {"_DimRange": _record},
}

#: The functions: module, name, and the checked function that runs in place of the named one.
_FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "_codecs": {"encode": _encode},
    "copyreg": {"__newobj__": _newobj, "__newobj_ex__": _newobj_ex},
    "numpy._core.multiarray": {"_reconstruct": _reconstruct, "scalar": _scalar},
    "numpy.random._pickle": {
        "__bit_generator_ctor": _new_bit_generator,
        "__generator_ctor": _new_generator,
        "__randomstate_ctor": _new_random_state,
    },
    "numpy.random.bit_generator": {"__pyx_unpickle_SeedSequence": _new_seed_sequence},
    "torch._utils": {
        "_rebuild_device_tensor_from_cpu_tensor": _rebuild_on_device,
        "_rebuild_meta_tensor_no_storage": _rebuild_meta_tensor,
        "_rebuild_nested_tensor": _rebuild_nested_tensor,
        "_rebuild_parameter": _rebuild_parameter,
        "_rebuild_parameter_with_state": _rebuild_parameter_with_state,
        "_rebuild_qtensor": _rebuild_qtensor,
        "_rebuild_sparse_tensor": _rebuild_sparse_tensor,
        "_rebuild_tensor": _rebuild_tensor,
        "_rebuild_tensor_v2": _rebuild_tensor_v2,
        "_rebuild_tensor_v3": _rebuild_tensor_v3,
        "_rebuild_wrapper_subclass": _rebuild_wrapper,
    },
    "torch._tensor": {"_rebuild_from_type_v2": _rebuild_from_type},
    "torch.nested._internal.nested_tensor": {"_rebuild_njt": _rebuild_njt},
    "torch.serialization": {"_get_layout": _layout},
    "tensorferry._rebuild": {"rebuild_dtensor": _rebuild_dtensor, "with_grad": _with_grad},
}

#: The functions that a pickle may pass to ``_rebuild_from_type_v2``.
_REBUILDING = frozenset(
    run for name, run in _FUNCTIONS["torch._utils"].items() if name not in ("_rebuild_parameter_with_state",)
) | {_rebuild_njt}

#: Other names of rows, as older and newer versions of Python, numpy, torch and this package write them.
_ALIASES: dict[tuple[str, str], tuple[str, str]] = {
    **_rebuild.FORMER,
    ("numpy.core.multiarray", "_reconstruct"): ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"): ("numpy._core.multiarray", "scalar"),
    **{(f"numpy.random.{module}", name): ("numpy.random", name) for module, names in {
        "_mt19937": ("MT19937",), "_pcg64": ("PCG64", "PCG64DXSM"), "_philox": ("Philox",), "_sfc64": ("SFC64",),
        "bit_generator": ("SeedSequence",), "_generator": ("Generator",), "mtrand": ("RandomState",),
    }.items() for name in names},
    **{("pathlib._local", name): ("pathlib", name) for name in _CLASSES["pathlib"]},
    ("torch", "UntypedStorage"): ("torch.storage", "UntypedStorage"),
    ("torch._C", "Generator"): ("torch", "Generator"),
    ("torch.distributed.tensor._api", "DTensor"): ("torch.distributed.tensor", "DTensor"),
    **{("torch.distributed.tensor", name): ("torch.distributed.tensor.placement_types", name) for name in (
        "Partial", "Replicate", "Shard",
    )},
    ("torch.distributed.device_mesh", "_MeshLayout"): ("torch.distributed._mesh_layout", "_MeshLayout"),
}  # fmt: skip

#: Values that are neither classes nor functions, by name.
_VALUES: dict[tuple[str, str], Any] = {
    ("builtins", "Ellipsis"): ...,
    ("builtins", "NotImplemented"): NotImplemented,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype | torch.qscheme)},
}

#: Modules that are not imported for a pickle: their rows exist only if this process has imported them already.
_NOT_FOR_A_PEER = ("torch._dynamo.decorators", "torch._dynamo")

_found: dict[tuple[str, str], Any] = {}
_kinds: dict[int, Kind] = {}


def names() -> list[tuple[str, str]]:
    """Returns module and name of every row of the table, aliases included."""
    own = [(module, name) for table in (_CLASSES, _FUNCTIONS) for module, rows in table.items() for name in rows]
    return [*own, *_ALIASES, *_VALUES, *(("torch.return_types", name) for name in _structseqs())]


def known(module: str, name: str) -> bool:
    """Whether the table has a row with this name."""
    module, name = _ALIASES.get((module, name), (module, name))
    listed = name in _CLASSES.get(module, ()) or name in _FUNCTIONS.get(module, ())
    return listed or (module, name) in _VALUES or (module == "torch.return_types" and name in _structseqs())


def find(module: str, name: str) -> Any:
    """Returns the object of a row; for a function, a :class:`Function`.

    Raises:
        LookupError: the table has no such row, or the object does not exist in this process
    """
    key = _ALIASES.get((module, name), (module, name))
    if key in _found:
        return _found[key]
    if key in _VALUES:
        return _VALUES[key]
    _found[key] = made = _make(*key)
    return made


def _make(module: str, name: str) -> Any:
    if module == "torch.return_types":
        cls = _structseqs()[name]
        _kinds[id(cls)] = _structseq(cls)
        return cls
    if (run := _FUNCTIONS.get(module, {}).get(name)) is not None:
        return Function(f"{module}.{name}", run)
    kind = _CLASSES[module][name]
    try:
        found: Any = sys.modules[module] if module in _NOT_FOR_A_PEER else importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        raise LookupError(f"{module}.{name} does not exist in this process") from e
    # Two names can stand for one class; their rows are the same.
    _kinds.setdefault(id(found), kind(found))
    return found


def kind_of(cls: Any) -> Kind | None:
    """Returns what a pickle may do with a class; ``None`` if the class is not in the table."""
    return _kinds.get(id(cls))


@cache
def _structseqs() -> dict[str, Any]:
    """Returns by name the tuple classes with named fields that torch's functions return."""
    with contextlib.suppress(ImportError):
        module = importlib.import_module("torch.return_types")
        return {
            name: cls
            for name, cls in vars(module).items()
            if isinstance(cls, type) and cls.__bases__ == (tuple,) and hasattr(cls, "n_sequence_fields")
            and (cls.__module__, cls.__qualname__) == ("torch.return_types", name)
        }  # fmt: skip
    return {}


# A pickle can have leaves of these classes, as references, without naming the classes.
find("torch", "Tensor")
find("torch.nn.parameter", "Parameter")
