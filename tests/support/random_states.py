"""Random states of everything that is pickled natively, and of what looks like it."""

from __future__ import annotations

import collections
import datetime
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from pickled_classes import Colour, DictSubclass, FailsToPickle, Holder, Level, ListSubclass, Slotted, StrSubclass

if TYPE_CHECKING:
    from collections.abc import Callable

#: Where the encoding of an integer changes.
EDGES = [sign * (1 << bits) + off for bits in (8, 16, 31, 32, 53, 63, 64, 80) for sign in (1, -1) for off in (-1, 0, 1)]
EDGES += range(-3, 4)
TEXTS = [
    "", "typed", "leaf", "float32", "\ud800", "a\udfffb", "\U0001f980", "h\x05.", "x" * 255, "é" * 300,
    b"", b"h\x05.", b"\x94" * 9, b"b" * 256, bytearray(b"mutable"),
]  # fmt: skip
DTYPES = [
    "?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "g", "F", "D", "G",
    "M8[s]", "m8[ns]", "S3", "U2", "V5", "O", "i4,f8", [("a", "<i4"), ("b", ">f8", (2,))],
]  # fmt: skip

#: numpy reads arrays of these from a pickle as arrays in the order of bytes of this machine.
SWAPPED = [">i2", ">f4", ">c8"]


class Array(np.ndarray):
    pass


class Marked(torch.Tensor):
    pass


class MarkedDTensor(DTensor):
    pass


def scalar(draw: random.Random) -> Any:
    kind = draw.randrange(9)
    if kind < 5:
        return draw.choice([*EDGES, draw.getrandbits(300), -draw.getrandbits(40), draw.random(), draw.randrange(9)])
    if kind == 5:
        return draw.choice([math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e300, complex(1, -0.0)])
    return draw.choice([None, True, False, *TEXTS])


def array(draw: random.Random, classes: bool, swapped: bool) -> Any:
    dtype = np.dtype(draw.choice(DTYPES + SWAPPED if swapped else DTYPES))
    if draw.randrange(10) == 0 and not dtype.hasobject:
        dtype = np.dtype(dtype, metadata={"unit": "m"})
    shape = tuple(draw.randrange(4) for _ in range(draw.randrange(4)))
    count = math.prod(shape)
    if dtype.hasobject:
        made = np.array([None, "text", 3, (1, 2)] * count + [None], dtype)[:count].reshape(shape)
    else:
        made = (np.arange(count * dtype.itemsize) % 2).astype(np.uint8).view(dtype).reshape(shape)
    how = draw.choice(["", "", "transposed", "step", "expanded", "masked", "class", "scalar", "read only"])
    if how == "transposed":
        return made.T
    if how == "step" and made.ndim:
        return made[::2]
    if how == "expanded":
        return np.broadcast_to(made, (2, *made.shape))
    if how == "masked" and classes and swapped and dtype.kind in "biufc":
        return np.ma.MaskedArray(made, mask=np.zeros(made.shape, bool))
    if how == "class" and classes:
        return made.view(Array)
    # Numpy pickles a scalar of type "q" as one of type "l".
    if how == "scalar" and made.size and not dtype.hasobject and dtype.char not in "qQ":
        return made.reshape(-1)[0]
    if how == "read only":
        made.flags.writeable = False
    return made


def tensor(draw: random.Random, pool: list[torch.Tensor], classes: bool) -> torch.Tensor:
    dtype = draw.choice(
        [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.uint16]
    )
    made = draw.choice(pool).view(dtype)
    shapes = [
        made[:7].clone(), made[3:9], made[1::3], made[2].expand(2, 3), made[:16].view(4, 4).T,
        made[:1].as_strided((1, 3, 1), (9, 1, 7)), made[:0],
    ]  # fmt: skip
    made = draw.choice(shapes)
    wrap = draw.choice(["", "", "grad", "parameter", "frozen", "attribute", "class"])
    if wrap == "class" and classes:
        return made.as_subclass(Marked)
    if wrap == "attribute":
        made.note = "kept"  # type: ignore[attr-defined]
    elif wrap == "frozen":
        return nn.Parameter(made, requires_grad=False)
    elif dtype.is_floating_point and wrap == "parameter":
        return nn.Parameter(made)
    elif dtype.is_floating_point and wrap == "grad":
        return made.detach().requires_grad_()
    return made


class Meshes:
    """Makes DTensors over meshes of a process group of four."""

    def __init__(self) -> None:
        self.all = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))]
        self.made: list[DTensor] = []

    def dtensor(self, draw: random.Random, pool: list[torch.Tensor], classes: bool) -> torch.Tensor:
        mesh = draw.choice(self.all)
        kinds = [Shard(0), Shard(0), Shard(1), Replicate(), Partial(), Partial("avg"), _StridedShard(0, split_factor=2)]
        placements = [draw.choice(kinds) for _ in range(mesh.ndim)]
        base = draw.choice(pool).view(draw.choice([torch.float32, torch.bfloat16, torch.int32, torch.uint8]))
        local = draw.choice(
            [base[:6].clone().view(2, 3), base[4:16].view(3, 4), base[:12].view(4, 3).T, base[:32].view(4, 8)[:, 1:3]]
        )
        if self.made and draw.randrange(4) == 0:
            local = draw.choice(self.made)._local_tensor
        how = draw.choice(
            ["", "", "", "spec", "uneven", "detached", "parameter", "grad", "attribute", "local grad", "class"]
        )
        if how == "local grad" and local.is_floating_point():
            local = local.detach().requires_grad_()
        if how == "class" and classes:
            local = local.as_subclass(draw.choice([Marked, nn.Parameter])) if local.is_floating_point() else local
        whole = {}
        if how == "uneven":
            rows, columns = local.shape
            whole = {"shape": torch.Size((rows * 4 - 1, columns)), "stride": (columns, 1)}
        with torch.no_grad():
            made = DTensor.from_local(local, mesh, placements, run_check=False, **whole)
        if how == "spec" and self.made:
            # As an optimizer's state shares it with the parameter.
            spec = draw.choice(self.made)._spec
            made = DTensor(torch.zeros(local.shape, dtype=spec.tensor_meta.dtype), spec, requires_grad=False)
        elif how == "detached":
            made = made.detach()
        elif how == "parameter" and made.is_floating_point() and not local.storage_offset():
            made = nn.Parameter(made)
        elif how == "grad" and made.is_floating_point():
            made = made.detach().requires_grad_()
        elif how == "attribute" and not local.storage_offset():
            made.note = "kept"
        elif how == "class" and classes and draw.randrange(2):
            made = MarkedDTensor(local, made._spec, requires_grad=False)
        self.made.append(made)
        return made


def state_of(seed: int, classes: bool, meshes: Meshes) -> list[Any]:
    """Makes a state; unless `classes`, one that a receiver reads without trusting the source.

    With an even seed it may hold arrays that no pickle of numpy keeps as they are: of swapped bytes, or masked.
    """
    draw = random.Random(seed)
    pool = [torch.arange(256).remainder(2).to(torch.uint8) for _ in range(3)]
    meshes.made.clear()
    made: list[Any] = []

    def node(levels: int) -> Any:
        kind = draw.randrange(14)
        if made and kind == 0:
            return draw.choice(made)
        if kind < 3:
            value = scalar(draw)
        elif kind < 5:
            value = array(draw, classes, seed % 2 == 0)
        elif kind < 7:
            value = tensor(draw, pool, classes)
        elif kind > 11:
            value = meshes.dtensor(draw, pool, classes)
            if draw.randrange(4) == 0:
                made.append(value._local_tensor)  # type: ignore[attr-defined]
        elif kind == 7 or not levels:
            value = draw.choice([torch.float32, torch.Size([2]), datetime.timedelta(3), {1, 2}, ...])
        else:
            return wrapped(levels)
        made.append(value)
        return value

    def wrapped(levels: int) -> Any:
        items = [node(levels - 1) for _ in range(draw.randrange(1, 4))]
        keys = ["a", "b", "\ud800", 1, None, 2**70, (1, "a")]
        kinds: list[Callable[[], Any]] = [
            lambda: items,
            lambda: tuple(items),
            lambda: dict(zip(draw.sample(keys, len(items)), items, strict=True)),
            lambda: collections.OrderedDict(enumerate(items)),
            lambda: collections.deque(items),
            lambda: in_array(items),
        ]
        of_users: list[Callable[[], Any]] = [
            lambda: Holder(items=items),
            lambda: cycle(items),
            lambda: nested(items),
            lambda: FailsToPickle() if draw.randrange(4) == 0 else Holder(a=items[0]),
            lambda: Slotted(items[0], items[-1]),
            lambda: ListSubclass(items),
            lambda: DictSubclass(a=items),
            lambda: draw.choice([StrSubclass("s"), Level.HIGH, Colour.RED]),
        ]
        return draw.choice(kinds + of_users if classes else kinds)()

    return [node(2) for _ in range(draw.randrange(1, 8))]


def in_array(items: list[Any]) -> Any:
    made = np.empty(1, object)
    made[0] = items
    return made


def nested(items: list[Any]) -> list[Any]:
    """Deeper than a tree goes, so that the innermost lists are one object."""
    for _ in range(100):
        items = [items]
    return items


def cycle(items: list[Any]) -> Holder:
    made = Holder(items=items)
    made.me = [made]
    return made
