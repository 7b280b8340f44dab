"""What is known is pickled natively, everything else by Python: a receiver gets the same from both."""

from __future__ import annotations

import contextlib
import copyreg
import gc
import io
import pickle
import pickletools
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from equality import assert_same_state
from exchange import TIMEOUT, send_and_receive
from pickled_classes import FailsToPickle, Holder
from pickled_states import dump, in_python
from random_states import Meshes, state_of
from tensorferry import TensorferryError, UnsupportedLeaf
from tensorferry.memory.accelerator import ACCELERATOR
from tensorferry.memory.staging import HostStager
from tensorferry.state import pickling, snapshot, tree
from tensorferry.state.snapshot import StateSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable


class Counted:
    """Counts how often it was pickled, in what is pickled."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.count = 0

    def __getstate__(self) -> Any:
        self.count += 1
        return self.__dict__.copy()


@pytest.mark.waits
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


@pytest.mark.waits
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


def test_what_cannot_be_pickled_is_named_among_what_is_pickled_natively() -> None:
    with pytest.raises(UnsupportedLeaf, match=r"b\.c .*no pickle of this one"):
        dump({"a": 1.5, "b": {"c": FailsToPickle()}, "d": np.arange(2)})


def test_pickles_are_those_of_pythons_opcodes() -> None:
    """A pickle can be read with Python's own tools, and has one frame after the other."""
    data = dump({str(n): np.zeros(n) if n % 2 else Holder(n="y" * n) for n in range(600)})
    out = io.StringIO()
    pickletools.dis(data, out)
    assert out.getvalue().count("FRAME") > 1
