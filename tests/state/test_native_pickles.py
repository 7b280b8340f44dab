"""What is known is pickled natively, everything else by Python: a receiver gets the same from both."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime
import gc
import io
import math
import pickle
import pickletools
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from equality import assert_same_state
from exchange import TIMEOUT, send_and_receive
from pickled_classes import Colour, DictSubclass, FailsToPickle, Holder, Level, ListSubclass, Slotted, StrSubclass
from tensorferry import TensorferryError, UnsupportedLeaf
from tensorferry.memory.accelerator import ACCELERATOR
from tensorferry.memory.staging import HostStager
from tensorferry.state import pickling, snapshot, tree
from tensorferry.state.snapshot import StateSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class Integer(int):
    pass


class Array(np.ndarray):
    pass


class Marked(torch.Tensor):
    pass


class MarkedDTensor(DTensor):
    pass


class OtherShard(Shard):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shard)

    def __hash__(self) -> int:
        return hash(Shard(0))


class Counted:
    """Counts how often it was pickled, in what is pickled."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.count = 0

    def __getstate__(self) -> Any:
        self.count += 1
        return self.__dict__.copy()


class Reduced:
    """Is pickled as a call, with a state."""

    def __init__(self, name: Any) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return Reduced, (self.name,), self.__dict__


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
    how = draw.choice(["", "", "transposed", "fortran", "step", "expanded", "masked", "class", "scalar", "read only"])
    if how == "transposed":
        return made.T
    if how == "fortran":
        return np.asfortranarray(made)
    if how == "step" and made.ndim:
        return made[::2]
    if how == "expanded":
        return np.broadcast_to(made, (2, *made.shape))
    if how == "masked" and classes and swapped and dtype.kind in "biufc":
        return np.ma.MaskedArray(made, mask=np.zeros(made.shape, bool))
    if how == "class" and classes:
        return made.view(Array)
    if how == "scalar" and made.size and not dtype.hasobject:
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


@pytest.fixture
def meshes() -> Iterator[Meshes]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        yield Meshes()
    finally:
        dist.destroy_process_group()


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
            value = draw.choice([torch.float32, torch.Size([2]), datetime.timedelta(3), {1, 2}, slice(3), ...])
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
            lambda: Reduced(items[0]),
            lambda: ListSubclass(items),
            lambda: DictSubclass(a=items),
            lambda: draw.choice([StrSubclass("s"), Integer(3), Level.HIGH, Colour.RED]),
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


def in_python(patch: pytest.MonkeyPatch) -> None:
    """Lets states be read and pickled without the native code."""
    flatten = tree.flatten
    patch.setattr(tree, "flatten", lambda state, _native=True: flatten(state, False))


@pytest.mark.beyond_torchft
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trust", [True, False])
def test_a_receiver_gets_the_same_from_both(
    trust: bool,
    meshes: Meshes,
    open_transport: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    sender, receiver = open_transport(), open_transport(trust_pickle=trust)
    seeds = range(pytestconfig.getoption("--pickled-states"))
    native = pickling._pickle_objects
    pickled = refused = 0

    def counting(*arguments: Any) -> bytes | None:
        nonlocal pickled
        data = native(*arguments)
        pickled += data is not None
        return data

    monkeypatch.setattr(pickling, "_pickle_objects", counting)
    for seed in seeds:
        state = state_of(seed, trust, meshes)
        received: list[Any] = []
        for step in (2 * seed, 2 * seed + 1):
            with monkeypatch.context() as patch:
                if step % 2:
                    in_python(patch)
                try:
                    received.append(send_and_receive(sender, receiver, state, step))
                except TensorferryError as e:
                    received.append(type(e))
            sender.disallow_checkpoint()
        if isinstance(received[0], type):
            refused += 1
            assert received[0] is received[1], seed
            continue
        assert_same_state(*received)
        assert layouts(received[0]) == layouts(received[1]), seed
        if seed % 2:
            assert_same_state(received[0], state)
    assert pickled > len(seeds) // 4
    assert refused < len(seeds) // 4


def layouts(state: Any) -> list[Any]:
    """Returns what `assert_same_state` does not compare of the arrays in a state's containers."""
    leaves = torch.utils._pytree.tree_leaves(state)
    return [(a.strides, str(a.flags), a.dtype.str) for a in leaves if isinstance(a, np.ndarray)]


def dump(state: Any) -> bytes:
    return pickling.dump(tree.flatten(state))[0]


def test_thousands_of_objects_keep_their_order_and_identity(open_transport: Callable[..., Any]) -> None:
    """More than a batch of a list, a frame, and a byte of memo numbers."""
    whole, shared = torch.arange(9000.0), Holder(name="one")
    kinds: list[Callable[[int], Any]] = [
        float,
        lambda n: whole[n : n + 2],
        lambda n: np.arange(n % 50),
        lambda n: np.float32(n),
        lambda n: "x" * (n % 300),
        lambda n: Holder(n=n, shared=shared),
        lambda n: nn.Parameter(whole[n : n + 1]),
        lambda n: (1 << 70) + n,
        lambda n: np.zeros(n * 20, np.uint8),
    ]
    state = {str(n): kinds[n % len(kinds)](n) for n in range(4500)}
    assert_same_state(send_and_receive(open_transport(), open_transport(trust_pickle=True), state), state)


@pytest.mark.parametrize("inside", ["array", "view"])
def test_an_object_in_another_one_and_in_the_tree_stays_one(inside: str, open_transport: Callable[..., Any]) -> None:
    one = np.arange(3) if inside == "array" else torch.arange(9)[2:4]
    for state in ({"o": Holder(one=one), "one": one}, {"one": one, "o": Holder(one=one)}):
        received = send_and_receive(open_transport(), open_transport(trust_pickle=True), state)
        assert received["o"].one is received["one"]


def test_a_class_that_copyreg_knows_is_pickled_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": np.arange(3)}
    assert pickle.loads(dump(state))[0].tolist() == [0, 1, 2]
    monkeypatch.setitem(copyreg.dispatch_table, np.ndarray, lambda array: (list, (array.tolist()[::-1],)))
    assert pickle.loads(dump(state)) == [[2, 1, 0]]


def random_plain(draw: random.Random) -> list[Any]:
    """Returns objects of plain containers, some of which stand in several places, within themselves even."""
    made: list[Any] = []

    def node(levels: int) -> Any:
        if made and draw.randrange(5) == 0:
            return draw.choice(made)
        if not levels or draw.randrange(4) == 0:
            return draw.choice([None, True, 0.5, draw.choice(EDGES), *TEXTS[:8]])
        kind = draw.choice([list, tuple, dict, collections.OrderedDict])
        if kind is tuple:
            value: Any = tuple(node(levels - 1) for _ in range(draw.randrange(6)))
        elif kind is list:
            value = []
            made.append(value)
            value += [node(levels - 1) for _ in range(draw.randrange(4))]
        else:
            value = kind()
            made.append(value)
            for _ in range(draw.randrange(5)):
                value[draw.choice(["version", "", "é", 1, None, 2.5, (1, "a"), ("b", (2,)), 2**70])] = node(levels - 1)
            if value and kind is collections.OrderedDict:
                value.move_to_end(draw.choice(list(value)))
        made.append(value)
        return value

    return [node(5) for _ in range(draw.randrange(1, 6))]


def shape_of(value: Any, seen: dict[int, int]) -> Any:
    """Returns what a value is made of, and where its containers and keys stand again."""
    if not isinstance(value, list | tuple | dict):
        return type(value), repr(value)
    if value and id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return type(value), [(shape_of(key, {}), shape_of(one, seen)) for key, one in list(items)]


def objects_of(values: list[Any]) -> Any:
    """Returns a flattened state whose objects are ``values``."""
    flat = tree.Flat()
    flat.objects.extend(values)
    flat.object_paths.extend(f"o{n}" for n in range(len(values)))
    return flat


def test_plain_containers_are_what_pythons_pickler_makes_of_them() -> None:
    native = 0
    for seed in range(400):
        values = random_plain(random.Random(seed))
        flat = objects_of(values)
        if (pickled := pickling.plain(flat)) is None:
            continue
        native += 1
        data, names = pickled
        expected = pickling._Pickler(io.BytesIO(), flat)
        assert shape_of(pickle.loads(data), {}) == shape_of(pickle.loads(expected.all()), {}), seed
        assert names.keys() == expected.globals.keys(), seed
        pickletools.dis(data, out=io.StringIO())
    assert native > 80


@pytest.mark.parametrize("count", [999, 1000, 1001, 2000, 3500])
def test_long_plain_containers_come_in_batches(count: int) -> None:
    values = [list(range(count)), {str(n): n for n in range(count)}, tuple(range(count))]
    values.append(collections.OrderedDict.fromkeys(range(count)))
    pickled = pickling.plain(objects_of(values))
    assert pickled is not None
    assert pickle.loads(pickled[0]) == values
    batches = [op.name for op, _, _ in pickletools.genops(pickled[0]) if op.name in ("APPENDS", "SETITEMS")]
    assert batches == ["APPENDS"] * -(-count // 1000) + ["SETITEMS"] * (2 * -(-count // 1000)) + ["APPENDS"]


def in_lists(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def in_itself() -> tuple[Any, ...]:
    value: tuple[Any, ...] = ([],)
    value[0].append(value)
    return value


def with_attribute() -> collections.OrderedDict[str, Any]:
    value = collections.OrderedDict(a=1)
    value.note = "kept"  # type: ignore[attr-defined]
    return value


@pytest.mark.parametrize(
    "value",
    [
        {"a": b"bytes"}, [1, {2}], in_lists(80), in_itself(), with_attribute(), {"\ud800": 1}, DictSubclass(a=1),
        ListSubclass([1]), {"a": 2**70}, collections.defaultdict(int), {StrSubclass("s"): 1}, [torch.float32],
    ],
)  # fmt: skip
def test_what_is_more_than_a_plain_container_is_left_to_python(value: Any) -> None:
    assert pickling.plain(objects_of([1.5, value])) is None


def test_an_ordered_dict_that_copyreg_knows_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = objects_of([collections.OrderedDict(a=1)])
    assert pickling.plain(flat) is not None
    monkeypatch.setitem(copyreg.dispatch_table, collections.OrderedDict, lambda value: (list, (list(value),)))
    assert pickling.plain(flat) is None


def test_the_states_of_modules_and_optimizers_are_pickled_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    state = {"m": module.state_dict(), "o": optimizer.state_dict(), "s": schedule.state_dict()}
    expected = dump(state)
    monkeypatch.setattr(pickling, "dump", None)
    made = StateSnapshot(state, HostStager(ACCELERATOR), "borrow")
    assert made.globals == {("collections", "OrderedDict"): "m.__dict__"}
    assert pickle.loads(made.pickle_bytes) == pickle.loads(expected)


NATIVE = [
    (tree, "no_rows"),
    (pickling, "_pickle_plain"),
    (pickling, "_pickle_objects"),
    (snapshot, "_add_pieces"),
]


@pytest.mark.parametrize(("module", "name"), NATIVE)
def test_a_mistake_of_the_native_code_is_not_hidden(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def fails(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(module, name, fails)
    whole = torch.arange(9.0)
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        StateSnapshot({"a": 1.5, "v": whole[2:4], "whole": whole, "n": np.arange(3)}, HostStager(ACCELERATOR), "borrow")
    assert calls == 1


def test_an_interrupt_ends_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pickling, "_pickle_plain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        StateSnapshot({"a": 1.5}, HostStager(ACCELERATOR), "borrow")


@pytest.mark.beyond_torchft
def test_a_state_that_cannot_be_pickled_raises_its_own_error(open_transport: Callable[..., Any]) -> None:
    class Mapping(dict):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise ArithmeticError("no")

    with pytest.raises(UnsupportedLeaf, match="ArithmeticError"):
        open_transport().send_checkpoint([1], 1, {"a": 1.5, "b": Mapping()}, TIMEOUT)


@pytest.mark.beyond_torchft
def test_an_object_is_asked_once_for_what_is_pickled(open_transport: Callable[..., Any]) -> None:
    state = [Counted(torch.arange(3.0)), 1.5, Counted(torch.arange(4.0)[1:])]
    received = send_and_receive(open_transport(), open_transport(trust_pickle=True), state)
    assert [received[0].count, received[2].count] == [1, 1] == [state[0].count, state[2].count]


class Changes:
    """Calls a function when it is pickled."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        self.function()
        return str, ("changed",)


def changes(how: str, state: dict[str, Any], spec: Any) -> None:
    views: list[torch.Tensor] = state["views"]
    match how:
        case "clear":
            state.clear()
        case "grow":
            state.update({f"new{n}": n for n in range(1000)})
        case "drop views":
            views.clear()
            gc.collect()
        case "memory":
            for view in views:
                view.data = torch.ones(1)
        case "attributes":
            for view in views:
                view.note = "new"  # type: ignore[attr-defined]
        case "spec":
            vars(spec)["more"] = []
        case "collect":
            gc.collect()
        case "another send":
            StateSnapshot({"n": 1.5, "views": views}, HostStager(ACCELERATOR), "borrow")


HOW = ["clear", "grow", "drop views", "memory", "attributes", "spec", "collect", "another send"]


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("native", [True, False])
def test_a_state_that_changes_while_it_is_pickled_does_no_harm(
    how: str, native: bool, meshes: Meshes, open_transport: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is received somehow, or refused with an error of ours; the process goes on, and so does the transport."""
    if not native:
        in_python(monkeypatch)
    sender, receiver = open_transport(), open_transport(trust_pickle=True)
    whole = torch.arange(90.0)
    sharded = [DTensor.from_local(whole[n : n + 2], meshes.all[0], [Shard(0)], run_check=False) for n in range(4)]
    state: dict[str, Any] = {"a": 1.5, "whole": whole, "views": [whole[n : n + 3] for n in range(9)]}
    state["o"] = Changes(lambda: changes(how, state, sharded[1]._spec))
    state["later"] = [*sharded, whole[5:7], np.arange(3), 1 << 70, torch.arange(3.0)]
    with contextlib.suppress(TensorferryError):
        assert send_and_receive(sender, receiver, state, 1)["o"] == "changed"
    sender.disallow_checkpoint()
    assert send_and_receive(sender, receiver, [1.5, torch.arange(9.0)[2:4]], 2)[0] == 1.5


class Lies:
    """Says to be of another class, or fails to say it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @property
    def __class__(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def __reduce__(self) -> Any:
        return str, ("a lie",)


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("answer", [torch.Tensor, dict, list, np.ndarray, float, DTensor, RuntimeError("no")])
def test_an_object_that_lies_about_its_class_is_an_object(answer: Any, open_transport: Callable[..., Any]) -> None:
    state = {"o": Lies(answer), "n": 1.5, "v": torch.arange(9)[1:3]}
    sender, receiver = open_transport(), open_transport(trust_pickle=True)
    if isinstance(answer, Exception):
        with pytest.raises(UnsupportedLeaf, match="o is a"):
            send_and_receive(sender, receiver, state)
        return
    assert send_and_receive(sender, receiver, state)["o"] == "a lie"


@pytest.mark.beyond_torchft
def test_sending_again_and_again_leaves_nothing_behind(meshes: Meshes) -> None:
    whole = torch.arange(90.0)
    draw = random.Random(0)
    state = [1.5, whole[3:], np.arange(3), np.float32(1), "text", 1 << 70, Holder(a=whole[1:3])]
    state += [meshes.dtensor(draw, [whole.view(torch.uint8)], True) for _ in range(9)]

    def left(sends: int) -> int:
        """Returns how many more blocks of memory there are after so many sends."""
        before = sys.getallocatedblocks()
        for _ in range(sends):
            StateSnapshot(state, HostStager(ACCELERATOR), "borrow")
        gc.collect()
        return sys.getallocatedblocks() - before

    # Caches of torch and Python fill up meanwhile, one block at a time.
    assert min(left(100) for _ in range(4)) < 100


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch's tensors are read in Python"
)
def test_dtensors_that_differ_in_nothing_share_one_spec(meshes: Meshes) -> None:
    def made(rows: int, *placements: Any) -> DTensor:
        return DTensor.from_local(torch.zeros(rows, 4), meshes.all[0], placements, run_check=False)

    data = dump([made(2, Shard(0)) for _ in range(9)] + [made(2, Shard(1)), made(3, Shard(0)), made(2, Replicate())])
    assert data.count(b"_rebuild_tensor_v2") <= 1
    specs = [op for op, argument, _ in pickletools.genops(data) if argument == "tensor_meta"]
    assert len(specs) == 1
    flat = tree.flatten([made(2, Shard(0)), made(2, Shard(0)), made(2, Shard(1))])
    assert len(flat.rows.first_specs) == 2
    assert flat.unread == []
    # More than are compared first, each by turns with the others.
    kinds = [(rows, placement) for rows in (1, 2, 3, 4) for placement in (Shard(0), Shard(1))]
    assert len(tree.flatten([made(*kind) for _ in range(3) for kind in kinds]).rows.first_specs) == len(kinds)
    others = [
        DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)] * mesh.ndim, run_check=False) for mesh in meshes.all
    ]
    assert len(tree.flatten([made(2, Shard(0)), *others]).rows.first_specs) == 2, "each mesh has specs of its own"
    # Equal, and of another class.
    assert OtherShard(0) == Shard(0)
    other = made(2, Shard(0))
    # torch's caches may hand out the equal placement of the first class.
    other._spec = DTensorSpec(meshes.all[0], (OtherShard(0),), tensor_meta=other._spec.tensor_meta)
    assert len(tree.flatten([made(2, Shard(0)), other]).rows.first_specs) == 2
    # Names of fields that are not interned, as those of specs that were unpickled may be.
    pair = [made(2, Shard(0)), other]
    names = {name: "".join(iter(name)) for name in vars(other._spec)}
    for one in pair:
        fields = {names.get(name, name): value for name, value in vars(one._spec).items()}
        one._spec = object.__new__(DTensorSpec)
        object.__setattr__(one._spec, "__dict__", fields)
    assert len(tree.flatten(pair).rows.first_specs) == 2


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch's tensors are read in Python"
)
def test_specs_that_differ_in_anything_are_told_apart(meshes: Meshes) -> None:
    class OtherSize(tuple[int, ...]):
        def __eq__(self, other: object) -> bool:
            return self is other

        __hash__ = tuple.__hash__

    def made(placements: tuple[Any, ...] = (Shard(0),), **changed: Any) -> DTensor:
        meta = TensorMeta(torch.Size([2, 4]), (4, 1), torch.float32)._replace(**changed.pop("meta", {}))
        spec = DTensorSpec(meshes.all[0], placements, tensor_meta=meta)
        vars(spec).update(changed)
        return DTensor(torch.zeros(2, 4), spec, requires_grad=False)

    kinds: list[Callable[[], DTensor]] = [
        made,
        lambda: made((Shard(1),)),
        lambda: made((Replicate(),)),
        lambda: made((Partial("sum"),)),
        lambda: made((Partial("avg"),)),
        lambda: made((_StridedShard(0, split_factor=2),)),
        lambda: made((_StridedShard(0, split_factor=4),)),
        lambda: made((Shard(0), Shard(0))),
        lambda: made(meta={"shape": torch.Size([4, 2])}),
        lambda: made(meta={"shape": torch.Size([2, 4, 1]), "stride": (4, 1, 1)}),
        lambda: made(meta={"stride": (1, 2)}),
        lambda: made(note=1),
        lambda: made(note=True),
        lambda: made(note=-1),
        lambda: made(other=1),
        lambda: made(note=(1, (2,))),
        lambda: made(note=((1, 2),)),
    ]
    alike = [kind() for _ in range(3) for kind in kinds]
    assert tree.flatten(alike).unread == []
    firsts = tree.flatten(alike).rows.first_specs
    assert [id(spec) for spec, _ in firsts] == [id(one._spec) for one in alike[: len(kinds)]]
    # Each of these is like itself only.
    own = [made(note=OtherSize([1])), made(note=OtherSize([1])), made(note=[]), made(note=[]), made(note=1 << 70)]
    assert len(tree.flatten(own).rows.first_specs) == len(own)
    # What was computed of a spec does not count.
    hashed = made()
    hash(hashed._spec)
    assert len(tree.flatten([made(), hashed]).rows.first_specs) == 1
    # Python pickles those of a state with more placements than any has.
    strided = [made((_StridedShard(0, split_factor=n),)) for n in range(2, 80)]
    assert 0 < len(tree.flatten(strided).unread) < len(strided)


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("is_row", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_the_local_part_of_a_dtensor_that_is_a_leaf_stays_one_object(
    native: bool, is_row: bool, meshes: Meshes, open_transport: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        in_python(monkeypatch)
    whole = torch.arange(12.0).view(3, 4)
    local = whole if is_row else whole[1:]
    spec = DTensor.from_local(local, meshes.all[0], [Shard(0)], run_check=False)._spec
    one, two = (DTensor(local, spec, requires_grad=False) for _ in range(2))
    received = send_and_receive(open_transport(), open_transport(), [one, local, two])
    assert received[0]._local_tensor is received[1] is received[2]._local_tensor
    assert torch.equal(received[1], local)


def test_a_dtensor_that_its_spec_describes_wrongly_is_left_to_python(meshes: Meshes) -> None:
    made = DTensor.from_local(torch.zeros(2, 4), meshes.all[0], [Shard(0)], run_check=False)
    made._local_tensor = made._local_tensor.double()
    assert tree.flatten([made]).unread == [-1]


@pytest.mark.parametrize("failing", [False, True])
def test_torch_asks_classes_for_functions_wherever_their_code_may_run(
    failing: bool, meshes: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among DTensors it does not, which is quicker; other leaves and the caller notice nothing."""
    seen: list[bool] = []
    container = tree._Walk.container

    def recording(self: tree._Walk, value: Any, path: str, depth: int) -> str:
        seen.append(torch._C._is_torch_function_enabled())
        if failing:
            raise UnsupportedLeaf("odd")
        return container(self, value, path, depth)

    monkeypatch.setattr(tree._Walk, "container", recording)
    sharded = [DTensor.from_local(torch.zeros(2, 4), meshes.all[0], [Shard(0)], run_check=False) for _ in range(4)]
    odd = collections.deque([1])
    state = {"list": [*sharded[:2], odd, *sharded[2:]], "dict": {"a": sharded[0], "b": odd, "c": sharded[1]}}
    with pytest.raises(UnsupportedLeaf, match="odd") if failing else contextlib.nullcontext():
        tree.flatten(state)
    assert seen
    assert all(seen)
    assert torch._C._is_torch_function_enabled()


def test_what_cannot_be_pickled_is_named_among_what_is_pickled_natively() -> None:
    with pytest.raises(UnsupportedLeaf, match=r"b\.c .*no pickle of this one"):
        dump({"a": 1.5, "b": {"c": FailsToPickle()}, "d": np.arange(2)})


def test_pickles_are_those_of_pythons_opcodes() -> None:
    """A pickle can be read with Python's own tools, and has one frame after the other."""
    data = dump({str(n): np.zeros(n) if n % 2 else Holder(n="y" * n) for n in range(600)})
    out = io.StringIO()
    pickletools.dis(data, out)
    assert out.getvalue().count("FRAME") > 1
