# ruff: noqa: E501 (an attack reads best in one line)
"""Attacks by pickle, each by name: none runs, imports, changes or crashes anything, and each is an error of ours."""

from __future__ import annotations

import collections
import datetime
import decimal
import io
import pickle
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorferry
from hostile_pickles import Raw, again, build, call, global_, new, persistent, read, say, torch_archive, whole
from pickled_classes import Colour, Holder, a_function
from tensorferry.pickles.allowlist import Allowed
from tensorferry.pickles.globals import table as reviewed
from tensorferry.pickles.torch_archives import unpickled

pytestmark = [pytest.mark.timeout(100), pytest.mark.beyond_torchft]

REFUSALS = (tensorferry.errors.UnsafePickle, tensorferry.errors.ProtocolError)
V2 = global_("torch._utils", "_rebuild_tensor_v2")
HOOKS = call(global_("collections", "OrderedDict"))
DTYPE = call(global_("numpy", "dtype"), "f4", False, True)
ARRAY = call(global_("numpy._core.multiarray", "_reconstruct"), global_("numpy", "ndarray"), (0,), b"b")
OBJECTS = build(call(global_("numpy", "dtype"), "O", False, True), (3, "|", None, None, None, -1, -1, 63))
F4 = build(DTYPE, (3, "<", None, None, None, -1, -1, 0))
FLOATS = persistent("typed", 0, "float32")
NO = global_("torch", "float32")


def tensor(dtype: str, *size: int, stride: tuple[int, ...] = (1,), offset: int = 0) -> Raw:
    return call(V2, persistent("typed", 0, dtype), offset, size, stride, False, HOOKS)


def layout(name: str) -> Raw:
    return call(global_("torch.serialization", "_get_layout"), name)


def bomb(levels: int) -> Raw:
    """Returns nested pairs, each of the same pair twice: hashing it takes 2**levels steps."""
    return again((1,), levels, b"2\x86")


def deep(levels: int = 20_000) -> Raw:
    return again((1,), levels, b"\x85")


def record(module: str, name: str, **fields: Any) -> Raw:
    return build(new(global_(module, name)), fields)


def quantised(dtype: str, **metadata: bool) -> Raw:
    return call(V2, persistent("typed", 0, dtype), 0, (4,), (1,), False, HOOKS, metadata)


REMOTE = record("torch.distributed.remote_device", "_remote_device", _worker_name=deep(), _device=1, _rank=1)
SPARSE = global_("torch._utils", "_rebuild_sparse_tensor")
VOID = call(global_("numpy", "dtype"), "V4", False, True)

ATTACKS: dict[str, Any] = {
    "a record of a deep tuple, as a key": {REMOTE: None},
    "a record of a deep tuple, if it is a key": REMOTE,
    "records in records, as a key": {Raw(b"".join([new(global_("torch.distributed.remote_device", "_remote_device")) + b"}" + say("_worker_name")] * 2000) + b"N" + b"sb" * 2000): None},
    "an array of objects in an array of objects": build(ARRAY, (1, (1,), OBJECTS, False, [build(ARRAY, (1, (1,), OBJECTS, False, [1]))])),
    "dtypes in dtypes": Raw((VOID + b"(K\x03" + say("|") + b"N" + say(("a",)) + b"}" + say("a")) * 2000 + F4 + b"K\x00\x86sK\x04K\x01K\x00tb" * 2000),
    "a dtype that takes for ever to hash": Raw(F4 + b"\x94" + (b"0" + VOID + b"(K\x03" + say("|") + b"N" + say(("a", "b")) + b"}(" + say("a") + b"h\x00K\x00\x86" + say("b") + b"h\x00K\x00\x86uK\x04K\x01K\x00tbq\x00") * 31),
    **{f"{dtype} without its scales": quantised(dtype) for dtype in ("qint8", "quint4x2")},
    "quantised by v3": call(global_("torch._utils", "_rebuild_tensor_v3"), persistent("typed", 0, "uint8"), 0, (4,), (1,), False, HOOKS, global_("torch", "qint8")),
    "conj of what is not complex": quantised("float32", conj=True),
    "sparse indices that share memory": call(SPARSE, layout("torch.sparse_coo"), (tensor("int64", 1, 1 << 25, stride=(0, 0)), tensor("float32", 1 << 25, stride=(0,)), (5,), False)),
    "a reference of tuples": Raw(say(("storage", (1, 2), "0", "cpu", 4)) + b"Q"),
    "a reference that takes for ever to print": Raw(b"(" + bomb(60) + say(1) + b"tQ"),
    "a reference of a long text": persistent("typed", 0, "x" * 100_000),
    "a reference that is not a tuple": Raw(say("leaf") + b"Q"),
    "one pending built twice for another": Raw(DTYPE + b"2" + say((3, "<", None, None, None, -1, -1, 0)) + b"b0" + say((3, "<", None, None, None, -1, -1, 0)) + b"b" + DTYPE + b"\x86"),
    "an array in itself": Raw(ARRAY + b"q\x20" + b"(K\x01K\x01\x85" + OBJECTS + b"\x89]h\x20atb"),
    "dots": call(global_("collections", "abc.sys.exit"), 3),
    "a module": global_("torch", "os"),
    "torch's list, unreviewed": call(global_("torch", "FloatTensor"), 10**12),
    "object array from bytes": build(ARRAY, (1, (1,), OBJECTS, False, b"\x41" * 8)),
    "object array, list too short": build(ARRAY, (1, (100,), OBJECTS, False, [1])),
    "array, bytes too short": build(ARRAY, (1, (100,), F4, False, b"\x41" * 8)),
    "array of nothing": build(
        ARRAY, (1, (10**12,), build(call(global_("numpy", "dtype"), "V0", False, True), (3, "|", None, None, None, 0, 1, 0)), False, b"")
    ),
    "ndarray called": call(global_("numpy", "ndarray"), (10**12,)),
    "dtype of objects by flags": build(call(global_("numpy", "dtype"), "V8", False, True), (3, "|", None, ("a",), {"a": (OBJECTS, 0)}, 4, 1, 27)),
    "dtype of dtypes": call(global_("numpy", "dtype"), "f4,O", False, True),
    "dtype without state": DTYPE,
    "scalar of an object": call(global_("numpy._core.multiarray", "scalar"), OBJECTS, b"\x41" * 8),
    "scalar too short": call(global_("numpy._core.multiarray", "scalar"), F4, b"\x41"),
    "_set_obj_state on a class": call(global_("torch._utils", "_set_obj_state"), global_("torch", "Tensor"), {"size": 3}),
    "a function's state": build(V2, (None, {"__defaults__": (1,)})),
    "a leaf's state": build(persistent("leaf", 0), (FLOATS, 0, (10**12,), (1,))),
    "from_type of any function": call(global_("torch._tensor", "_rebuild_from_type_v2"), global_("builtins", "dict"), global_("torch", "Tensor"), (), {}),
    "a wrapper as a Tensor": call(
        global_("torch._tensor", "_rebuild_from_type_v2"), global_("torch._utils", "_rebuild_wrapper_subclass"),
        global_("torch", "Tensor"),
        (global_("torch.distributed.tensor", "DTensor"), NO, (8,), (1,), 0, layout("torch.strided"), "cpu", False), {},
    ),
    "tensor beyond its storage": tensor("float32", 1000),
    "tensor by a huge stride": tensor("float32", 2, stride=(1 << 61,)),
    "tensor of a huge size": tensor("float32", 1 << 62, stride=(0,)),
    "hooks": call(V2, FLOATS, 0, (2,), (1,), True, {1: global_("builtins", "dict")}),
    "sparse rows outside": call(
        global_("torch._utils", "_rebuild_sparse_tensor"), layout("torch.sparse_csr"),
        (tensor("int64", 2), tensor("int64", 2), tensor("float32", 2), (1, 1)),
    ),
    "Generator of a bad state": build(
        call(global_("torch", "Generator"), call(global_("torch", "device"), "cpu")), (1, None, tensor("uint8", 64))
    ),
    "ShardedTensor asking others": call(
        global_("torch._tensor", "_rebuild_from_type_v2"), global_("torch._utils", "_rebuild_wrapper_subclass"),
        global_("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
        (global_("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"), NO, (8,), (1,), 0,
         layout("torch.strided"), "cpu", False), ([], None, None, None, True),
    ),
    "DeviceMesh called": call(global_("torch.distributed.device_mesh", "DeviceMesh"), "cpu", [0, 1]),
    "a placement half made": new(global_("torch.distributed.tensor.placement_types", "Shard")),
    "a placement of any field": build(new(global_("torch.distributed.tensor.placement_types", "Shard")), {"dim": "x"}),
    "bytearray(10**12)": call(global_("builtins", "bytearray"), 10**12),
    "memo at 2**32": Raw(b"Nr\xff\xff\xff\xff" * 2 + b"0" + b"j\xfe\xff\xff\xff"),
    "list(range(10**12))": call(global_("builtins", "list"), call(global_("builtins", "range"), 10**12)),
    "BytesIO beyond its end": build(new(global_("_io", "BytesIO")), (b"", 1 << 60, None)),
    "a codec": call(global_("_codecs", "encode"), "x", "bz2_codec"),
    "a new Enum": call(global_("enum", "Enum"), "X", "a b"),
    "_reconstructor": call(global_("copyreg", "_reconstructor"), global_("builtins", "bytearray"), global_("builtins", "object"), None),
    "__reduce_ex__": call(global_("builtins", "object.__reduce_ex__"), 3, 4),
    "partial": call(global_("functools", "partial"), global_("builtins", "print")),
    "a factory": call(global_("collections", "defaultdict"), global_("torch.storage", "UntypedStorage")),
    "a day that is none": call(global_("datetime", "datetime"), b"\x07\xea\x01\xff\xff\xff\xff\xff\xff\xff"),
    "a key that takes for ever to hash": Raw(b"}" + bomb(60) + b"Ns"),
    "an object that takes for ever, if it is a key": bomb(60),
    "a key deeper than the stack": Raw(b"}" + again((1,), 200_000, b"\x85") + b"Ns"),
    "a set deeper than the stack": call(global_("builtins", "frozenset"), [again((1,), 200_000, b"\x85")]),
    "copies of copies": Raw(say(b"x" * 4000) + b"\x94(" + b"".join(say(global_("builtins", "bytearray")) + b"h\x00\x85R" for _ in range(400)) + b"t"),
    "extension codes": Raw(b"\x82\x01"),
    "an old class": Raw(b"(cbuiltins\nlist\no"),
    "a tuple for arguments": Raw(global_("builtins", "list") + say([]) + b"R"),
    "items of a class": Raw(global_("builtins", "list") + say(4) + b"a"),
    "os.system": call(global_("os", "system"), "true"),
    "a class's state": build(global_("pathlib", "Path"), (None, {"__add__": 3})),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_an_error_of_ours_and_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("os.system", ran.append)
    began = time.monotonic()
    with pytest.raises(REFUSALS) as caught:
        read(whole(ATTACKS[name]))
    assert time.monotonic() - began < 20
    assert not ran
    assert len(str(caught.value)) < 2000
    assert torch.arange(3.0).size() == torch.Size([3])


def test_a_dtypes_flags_are_numpys_own() -> None:
    """A pickle can set a dtype's flags, which numpy trusts: an array of numbers would become one of addresses."""
    (made,) = read(whole(build(DTYPE, (3, "|", None, None, None, 8, 1, 63))))
    assert (made, made.hasobject) == (np.dtype("f4"), False)


def test_what_is_refused_is_named_with_its_leaf_and_what_to_do() -> None:
    data = whole(tensor("float32", 1000))
    from tensorferry.state import pickling

    needs = {"torch._utils._rebuild_tensor_v2": "user.model.weight"}
    with pytest.raises(
        tensorferry.errors.UnsafePickle, match=r"_rebuild_tensor_v2.*'user\.model\.weight'.*trust_pickle=True"
    ):
        pickling.load(data, Allowed(), [], lambda _: torch.UntypedStorage(4), needs)


def test_the_planners_data_goes_through_the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorferry._native import Index
    from tensorferry.dcp import index

    ran: list[Any] = []
    monkeypatch.setattr("os.system", ran.append)
    made = Index()
    made.planner = whole(ATTACKS["os.system"])
    with pytest.raises(tensorferry.errors.UnsafePickle):
        _ = index.decode(made.encode(), "here", Allowed(), []).planner_data
    assert not ran


def test_objects_in_files_go_through_the_same_machine_and_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorferry.dcp import planner_objects

    ran: list[Any] = []
    monkeypatch.setattr("os.system", ran.append)
    with pytest.raises(tensorferry.errors.UnsafePickle, match=r"'?opt\.lr"):
        planner_objects.rewritten(torch_archive(whole(ATTACKS["os.system"])), "opt.lr", Allowed())
    assert not ran
    good = torch_archive(state={"lr": 0.1, "w": torch.ones(3)})
    # torch's planner reads its bytes without limits, so none of them may come from the source.
    handed = planner_objects.rewritten(good, "opt", Allowed())
    monkeypatch.setattr(planner_objects, "unpickled", lambda *_: "another")
    assert torch.load(io.BytesIO(handed), weights_only=True)["lr"] == 0.1
    assert torch.load(io.BytesIO(planner_objects.rewritten(good, "opt", Allowed()))) == "another"


# Pickles of honest senders are accepted. -----------------------------------------------------------------------------

HONEST: list[Any] = [
    np.array(["a", "bc"]), np.array([b"a"]), np.array([1, None, "x"], dtype=object), np.datetime64("2026-01-02T03"),
    np.array(["2026-01-02"], dtype="M8[ns]"), np.timedelta64(5, "m"), np.zeros(2, dtype=[("a", "<i4"), ("b", ">f8", (2,))]),
    np.zeros(2, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)), np.zeros((0, 3)), np.float64(0.5), np.str_("x"),
    np.array([True, False]), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.zeros(2, ">c16")[0],
    np.random.RandomState(3).get_state()[1], 1 << 200, -(1 << 70), bytearray(b"abc"), [np.random.default_rng(3).bit_generator.state],
    collections.Counter("abca"), collections.deque([1, 2], maxlen=3), collections.defaultdict(list, a=[1]),
    ([],), ({},), frozenset({1, (2, 3)}), {1, "a"}, {(1, 2): 3, 1.5: 2}, range(3, 9, 2), complex(1, -2), types.SimpleNamespace(a=1),
    Path("/a/b"), object, [list, dict, torch.nn.Parameter], torch.float8_e4m3fn, torch.Size([2, 3]), torch.device("cuda", 1),
    datetime.time(1, 2, 3), datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=1))), "é\ud800",
    [collections.deque([n]) for n in range(9)], collections.defaultdict(list, {n: collections.deque([n]) for n in range(9_000)}),
]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.strides == b.strides and bool((a == b).all())
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_python_writes_comes_back(protocol: int) -> None:
    for value in HONEST:
        (found,) = read(pickle.dumps([value], protocol))
        assert same(found, pickle.loads(pickle.dumps(value))), value


#: What hardly any state has: the reader has not reviewed it, and says what to do.
RARE: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "numpy.random._pickle.__generator_ctor": (lambda: np.random.default_rng(3), []),
    "decimal.Decimal": (lambda: decimal.Decimal("-1.50"), [decimal.Decimal]),
    "builtins.slice": (lambda: slice(1, None, 2), [slice]),
    "torch._utils._rebuild_qtensor": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 3, torch.quint8), [torch._utils._rebuild_qtensor],
    ),
    "torch.nested._internal.nested_tensor._rebuild_njt": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), [],
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", RARE)
def test_what_is_not_reviewed_is_refused_with_its_name_and_what_to_do(name: str) -> None:
    make, allowed = RARE[name]
    file = io.BytesIO()
    torch.save(Holder(a=make()), file)
    with pytest.raises(
        tensorferry.errors.UnsafePickle,
        match=rf"{re.escape(name)}.*for 'user'.*pass safe_globals=\[.*{re.escape(name)}",
    ):
        unpickled(file.getvalue(), "user", Allowed([Holder]))
    if allowed:
        assert type(unpickled(file.getvalue(), "user", Allowed([Holder, *allowed])).a) is type(make())


def test_classes_of_the_users_own_are_read_as_python_reads_them() -> None:
    allowed = Allowed([Holder, Colour, a_function])
    value = [Holder(a=1, b=[Colour.RED]), Colour.BLUE, a_function]
    (made, colour, function) = read(pickle.dumps(value, 4), allowed)
    assert (made.a, made.b, colour, function) == (1, [Colour.RED], Colour.BLUE, a_function)
    with pytest.raises(tensorferry.errors.UnsafePickle, match="an enum called with more than a value"):
        read(whole(call(global_("pickled_classes", "Colour"), "X", "a b")), allowed)
    with pytest.raises(tensorferry.errors.UnsafePickle):
        read(whole(build(global_("pickled_classes", "Holder"), (None, {"__init__": 3}))), allowed)
    with pytest.raises(tensorferry.errors.UnsafePickle):
        read(whole(build(global_("pickled_classes", "a_function"), (None, {"__defaults__": (3,)}))), allowed)


def test_an_allowed_class_allows_no_call_of_its_instances_and_no_state_for_its_own() -> None:
    class Made:
        def __call__(self) -> str:
            return "called"

    cls = global_(Made.__module__, Made.__qualname__)
    for hostile in (call(new(cls)), build(cls, (None, {"__call__": 3}))):
        with pytest.raises(tensorferry.errors.UnsafePickle):
            read(whole(hostile), Allowed([Made]))


def test_torchs_own_list_of_the_users_classes_counts() -> None:
    data = pickle.dumps([Holder(a=1)], 4)
    with pytest.raises(tensorferry.errors.UnsafePickle):
        read(data)
    with torch.serialization.safe_globals([Holder]):
        assert read(data)[0].a == 1
    with torch.serialization.safe_globals([torch.hub.load, __import__("os").system]):
        for hostile in (global_("torch.hub", "load"), global_("posix", "system"), global_("os", "system")):
            with pytest.raises(tensorferry.errors.UnsafePickle):
                read(whole(call(hostile, "true")))


# The review of the allow-list. ---------------------------------------------------------------------------------------


def test_what_torch_allows_and_we_have_not_reviewed_is_known() -> None:
    """Fails when a torch version allows something new: that is refused until it has been reviewed."""
    from torch._weights_only_unpickler import _get_allowed_globals

    ours = {f"{module}.{name}" for module, name in reviewed.names()}
    legacy = {f"{c.__module__}.{c.__name__}" for c in (*torch._tensor_classes, *torch._storage_classes)}
    left_out = set(_get_allowed_globals()) - ours - legacy
    assert left_out <= {
        f"torch._utils._rebuild_{what}"
        for what in ("device_tensor_from_numpy", "device_tensor_from_cpu_tensor", "nested_tensor", "qtensor")
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_indices_have_memory_that_no_other_tensor_of_the_state_writes_to() -> None:
    def row(at: int, *size: int) -> Raw:
        return call(V2, persistent("typed", 0, "int64"), at, size, (1,) * len(size), False, HOOKS)

    memory = torch.tensor([0, 1, 0, 3, 0, 0])
    from tensorferry.state import pickling

    def made(value: Raw) -> list[Any]:
        return pickling.load(whole([value, row(0, 6)]), Allowed(), [], lambda _: memory.untyped_storage(), {})[0]

    coo, everything = made(call(SPARSE, layout("torch.sparse_coo"), (row(0, 1, 1), row(0, 1), (4,), True)))
    csr, _ = made(call(SPARSE, layout("torch.sparse_csr"), (row(0, 2), row(2, 1), row(2, 1), (1, 4))))
    everything.fill_(1 << 40)
    assert coo._indices().tolist() == [[0]]
    assert (csr.crow_indices().tolist(), csr.col_indices().tolist()) == ([0, 1], [0])
    assert coo.to_dense().shape == (4,)


@pytest.mark.nightly
def test_no_global_of_the_table_makes_an_object_that_python_lets_go_of_by_recursion() -> None:
    """Freeing an object that is nested as deep as the pickle likes must not overflow the stack and kill the process."""
    code = """
import sys; sys.path.insert(0, "tests/support")
from hostile_pickles import *
N = 200_000
deque = global_("collections", "deque") + b")R"
def chain(before, after):
    return Raw(before * N + b"N" + after * N)
PUT, GET, KIND = b"rLAST0", b"jLAST", b"jKIND"
def within(layers, times=40_000):  # Each of the layers holds the one before it, the last in the memo.
    return Raw(objects + b"rKIND0N" + PUT + (layers + PUT) * times + GET)
objects = build(call(global_("numpy", "dtype"), "O", False, True), (3, "|", None, None, None, -1, -1, 63))
shell = call(global_("numpy._core.multiarray", "_reconstruct"), global_("numpy", "ndarray"), (0,), b"b")
array = shell + b"(K\\x01K\\x01\\x85" + KIND + b"\\x89]" + GET + b"atb" + PUT
for name, value in {
    "deque": chain(deque, b"a"),
    "deque of its items": Raw(b"N" + (b"q\\x070" + deque[:-2] + b"]h\\x07a\\x85R") * N),
    "defaultdict": chain(global_("collections", "defaultdict") + b"N\\x85RK\\x01", b"s"),
    "array and deque": within(array + deque[:-2] + b"]" + GET + b"a\\x85R"),
    "array, list and deque": within(array + b"]" + GET + b"a" + PUT + deque + GET + b"a"),
}.items():
    try:
        found = read(whole(value))
        del found
    except TensorferryError as e:
        print(name, type(e).__name__)
    print(name, "ended", flush=True)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
    assert done.stdout.count("ended") == 5


@pytest.mark.process
def test_random_pickles_of_every_global_do_nothing(pytestconfig: pytest.Config) -> None:
    """They are read in a process of its own, which has little memory and may import, open and run nothing meanwhile."""
    seconds = pytestconfig.getoption("--pickle-seconds")
    program = Path(__file__).parents[1] / "support" / "hostile_pickles.py"
    done = subprocess.run(
        [sys.executable, program, str(seconds), "3"], capture_output=True, text=True, timeout=seconds + 90
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    assert re.search(r"\d+ pickles of \d+ globals", done.stdout)
