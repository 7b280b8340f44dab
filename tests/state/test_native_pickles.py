"""What is known is pickled natively, everything else by Python: a receiver gets the same from both."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from equality import assert_same_state
from exchange import send_and_receive
from pickled_classes import Holder
from pickled_states import in_python
from random_states import Meshes, state_of
from tensorferry import TensorferryError
from tensorferry.memory.accelerator import ACCELERATOR
from tensorferry.memory.staging import HostStager
from tensorferry.state import pickling
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
@pytest.mark.filterwarnings("ignore:To construct DTensor from torch.Tensor:UserWarning")
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
        if seed % 2:
            assert_same_state(received[0], state)
    assert pickled > len(seeds) // 4
    assert refused < len(seeds) // 4


@pytest.mark.parametrize("inside", ["array", "view"])
def test_an_object_in_another_one_and_in_the_tree_stays_one(inside: str, open_transport: Callable[..., Any]) -> None:
    one = np.arange(3) if inside == "array" else torch.arange(9)[2:4]
    for state in ({"o": Holder(one=one), "one": one}, {"one": one, "o": Holder(one=one)}):
        received = send_and_receive(open_transport(), open_transport(trust_pickle=True), state)
        assert received["o"].one is received["one"]


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
        case "memory":
            for view in views:
                view.data = torch.ones(1)
        case "spec":
            vars(spec)["more"] = []
        case "another send":
            StateSnapshot({"n": 1.5, "views": views}, HostStager(ACCELERATOR), "borrow")


HOW = ["clear", "memory", "spec", "another send"]


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("how", HOW)
def test_a_state_that_changes_while_it_is_pickled_does_no_harm(
    how: str, meshes: Meshes, open_transport: Callable[..., Any]
) -> None:
    """It is received somehow, or refused with an error of ours; the process goes on, and so does the transport."""
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
