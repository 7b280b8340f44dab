"""NumPy's dtypes, arrays and scalars."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from .kinds import (
    Globals,
    Kind,
    Pending,
    Refused,
    all_are,
    as_value,
    checked_sizes,
    is_freed_recursively,
    require,
)

if TYPE_CHECKING:
    from ..unpickler import Unpickler


_DTYPE = re.compile(r"[biufcSUVmMO?]\d{0,9}", re.ASCII)


def _dtype(cls: Any) -> Kind:
    def make_dtype(_: Unpickler, text: Any, align: Any = False, copy: Any = False) -> Any:
        # The text of a dtype such as "V8" does not say what its parts are: those come with the state.
        require(type(text) is str and _DTYPE.fullmatch(text), "a dtype of an unknown kind")
        require(align in (False, 0, True) and copy in (False, 0, True), "a dtype with unexpected arguments")
        return Pending(lambda unpickler, state: _make_dtype(unpickler, text, state))

    return Kind(cls, call=make_dtype)


#: How deep dtypes may be nested: numpy walks them recursively.
_DEEPEST_DTYPE = 32


def _shallow(unpickler: Unpickler, dtype: Any) -> None:
    """Refuses a dtype of so many nested dtypes that numpy would take too long or too much stack."""
    todo = [(dtype, 0)]
    while todo:
        item, depth = todo.pop()
        require(depth < _DEEPEST_DTYPE, "a dtype that is nested too deep")
        unpickler.count_parts(1)
        parts = [item.base] if item.subdtype else [part[0] for part in (item.fields or {}).values()]
        todo += [(part, depth + 1) for part in parts]


def _make_dtype(unpickler: Unpickler, text: str, state: Any) -> Any:
    """Creates the dtype that a state describes, by numpy's public constructor, which only makes valid ones."""
    import numpy as np

    require(type(state) is tuple and len(state) in (8, 9) and state[0] in (3, 4), "a dtype of an unknown version")
    order, sub, names, fields, itemsize, alignment = state[1:7]
    require(
        type(order) is str and order in "<>=|" and all_are(int, itemsize, alignment), "a dtype without a byte order"
    )
    if sub is not None:
        require(
            type(sub) is tuple and len(sub) == 2 and isinstance(sub[0], np.dtype),
            "a dtype whose elements have no dtype",
        )
        _shallow(unpickler, sub[0])
        made = np.dtype((sub[0], checked_sizes(sub[1], "a shape")))
    elif names is not None:
        require(type(names) is tuple and all_are(str, *names) and type(fields) is dict, "a dtype with invalid fields")
        parts = [fields.get(name) for name in names]
        for part in parts:
            whole = type(part) is tuple and len(part) == 2
            require(whole and isinstance(part[0], np.dtype) and type(part[1]) is int, "a dtype with invalid fields")
        for part in parts:
            _shallow(unpickler, part[0])
        spec: dict[str, Any] = {
            "names": list(names),
            "formats": [p[0] for p in parts],
            "offsets": [p[1] for p in parts],
        }
        require(0 < itemsize < 1 << 31, "a dtype with an invalid size")
        aligned = alignment > 1
        of: Any = np.dtype
        made = of({**spec, "itemsize": itemsize}, align=aligned)
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
    """Stands for numpy's ``_reconstruct``: the array is created when its state comes."""
    import numpy as np

    require(
        cls is np.ndarray and shape == (0,) and all_are(tuple, shape) and kind in (b"b", "b"),
        "an array of an unexpected kind",
    )
    return Pending(_make_array)


def _make_array(unpickler: Unpickler, state: Any) -> Any:
    """Creates the array that a state describes: its shape, dtype, order and content."""
    import numpy as np

    require(type(state) is tuple and len(state) == 5 and state[0] == 1, "an array of an unknown version")
    _, shape, dtype, fortran, data = state
    sizes = checked_sizes(shape, "a shape")
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
        # numpy frees the objects recursively.
        require(
            not any([is_freed_recursively(item) for item in data]),
            "an array of objects with deques, defaultdicts or arrays of objects in it",
        )
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
    """Creates a scalar of numpy from its bytes."""
    import numpy as np

    require(isinstance(dtype, np.dtype) and not dtype.hasobject, "a number without a dtype")
    require(
        type(data) is bytes and len(data) == dtype.itemsize and data, "a number with more or fewer bytes than its dtype"
    )
    return np.frombuffer(data, dtype).copy()[0]


#: The classes: module, name, and the function that creates the ``Kind`` of the class.
CLASSES: Globals = {
    "numpy": {"dtype": _dtype, "ndarray": as_value},
}

#: The functions: module, name, and the checked function that runs in place of the named one.
FUNCTIONS: Globals = {
    "numpy._core.multiarray": {"_reconstruct": _reconstruct, "scalar": _scalar},
}
