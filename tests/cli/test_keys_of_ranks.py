"""``convert``, ``diff`` and a load of all of it have the keys of every rank, such as those of pipeline stages."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from checkpoint_loads import load_state, save_states
from kinds import FORMATS
from pickled_classes import Settings
from tensorferry.cli import exits
from tensorferry.errors import StateMismatch, UnsafePickle

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"),
]


def plain(stage: int) -> torch.Tensor:
    return torch.full((4,), 1.0 + stage)


def spread(stage: int) -> DTensor:
    """A DTensor of the mesh of one stage, which has one rank."""
    if "_rank" not in inspect.signature(DeviceMesh.__init__).parameters:
        pytest.skip("this torch makes no mesh of a rank without the other ones")
    mesh = DeviceMesh("cpu", [stage], _init_backend=False, _rank=stage)
    return DTensor.from_local(plain(stage), mesh, [Shard(0)], run_check=False)


def stages(kind: Callable[[int], torch.Tensor]) -> list[dict]:
    return [{"model": {f"layers.{stage}.w": kind(stage)}, "stage": torch.tensor(stage)} for stage in range(2)]


def check(state: dict, rank: int = 0) -> None:
    assert sorted(state["model"]) == ["layers.0.w", "layers.1.w"]
    for stage in range(2):
        assert type(state["model"][f"layers.{stage}.w"]) is torch.Tensor
        assert torch.equal(state["model"][f"layers.{stage}.w"], plain(stage))
    assert int(state["stage"]) == rank


@pytest.mark.parametrize("kind", [plain, spread])
def test_every_way_to_take_all_of_it_has_the_keys_of_all_stages(kind, tmp_path, run):
    folder = save_states(tmp_path / "c", stages(kind))
    for world_size in (1, 3):
        check(load_state(folder, world_size=world_size))
    check(load_state(folder, rank=1, world_size=3), 1)
    # Each format holds the same state, as ``diff`` says; one is read by torch itself.
    for to in FORMATS:
        assert run("convert", folder, tmp_path / to, "--to", to).status == exits.OK
        assert run("diff", folder, tmp_path / to).status == exits.OK
    check(torch.load(tmp_path / "torch"))
    shown = [line.split() for line in run("inspect", folder, "--digests").out.splitlines()[2:]]
    assert [(path, " ".join(rest[-3:])) for path, *rest in shown] == [
        ("model.layers.0.w", "over 1 ranks" if kind is spread else "on rank 0"),
        ("stage", "differs between ranks"),
        ("model.layers.1.w", "over 1 ranks" if kind is spread else "on rank 1"),
    ]
    assert run("convert", folder, tmp_path / "one.pt", "--rank", 1).status == exits.OK
    check(torch.load(tmp_path / "one.pt"), 1)
    assert run("convert", folder, tmp_path / "model.pt", "--only", "model.layers.1").status == exits.OK
    assert torch.load(tmp_path / "model.pt")["w"].tolist() == [2.0] * 4
    # Each rank of as many has its own.
    assert list(load_state(folder, rank=1, world_size=2)["model"]) == ["layers.1.w"]
    torch.save({"model": {"layers.0.w": plain(0)}, "stage": torch.tensor(0)}, tmp_path / "first.pt")
    done = run("diff", folder, tmp_path / "first.pt")
    assert (done.status, done.out) == (exits.NO, "model.layers.1.w: only in the first\n")


T = torch.ones(2)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([{"a": 1, "o": None}, {"a": 2, "b": {"c": 3}, "o": None}, {"b": {"d": T}}], {"a": 1, "b": {"c": 3, "d": T}}),
        ([{"groups": [{"lr": 0.1}]}, {"groups": [{"lr": 0.1}] * 2}], {"groups": [{"lr": 0.1}]}),
        ([{"chunks": ({"a": T}, T)}, {"chunks": ({"b": T},)}], {"chunks": ({"a": T, "b": T}, T)}),
        ([{(1, 2): T}, {(3, 4): T}], {(1, 2): T, (3, 4): T}),
        ([{"extra": {"a": T}}, {"extra": None}], {"extra": {"a": T}}),
        ([{"a": 1}, {"a": Settings(1.0, T), "b": T}], {"a": 1, "b": T}),
        ([{"a": 1}, {"b": Settings(1.0, T)}], UnsafePickle),
    ],
)
def test_values_are_the_first_ranks_and_keys_those_of_all(states, expected, tmp_path):
    folder = save_states(tmp_path / "c", states)
    if isinstance(expected, type):
        with pytest.raises(expected):
            load_state(folder)
        return
    found = load_state(folder)
    found.pop("o", None)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([{"m": {"a": T}}, {"m": {"a": {"b": T}}}], "m.a: a Tensor on rank 0, and a dict on rank 1"),
        ([{}, {"m": {"a": T}}, {"m": T}], "m: a dict on rank 1, and a Tensor on rank 2"),
        ([{"m": [T]}, {"m": [T, T]}], "m: 1 values on rank 0, and 2 on rank 1"),
        ([[T], {"a": T}], "the state: a list on rank 0, and a dict on rank 1"),
    ],
)
def test_states_that_cannot_be_put_together_are_refused_by_their_keys_and_ranks(states, told, tmp_path, run):
    folder = save_states(tmp_path / "c", states)
    with pytest.raises(StateMismatch, match=told):
        load_state(folder)
    done = run("convert", folder, tmp_path / "o.pt")
    assert done.status == exits.UNREADABLE
    assert told in done.err
    assert not (tmp_path / "o.pt").exists()
