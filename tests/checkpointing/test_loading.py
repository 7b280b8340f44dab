"""``load``: what is read, where it goes, and what is refused; torch's own reader is the oracle where it is right."""

from __future__ import annotations

import argparse
import collections
import enum
import urllib.request
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import in_place_doors
from checkpoint_loads import load_state, rank_file, save_by, save_state
from equality import assert_same_state
from leaves import CATALOGUE
from pickled_classes import Colour
from stand_in import stand_in
from tensorferry import HTTPTransport
from tensorferry._native import Stored
from tensorferry.checkpointing import SyncCheckpointer, checkpointers, load_file, loading
from tensorferry.errors import (
    CorruptCheckpoint,
    InvalidArgument,
    ProtocolError,
    StateMismatch,
    TensorferryError,
    UnsafePickle,
)
from tensorferry.memory.tensors import Unread
from tensorferry.pickles.allowlist import Allowed
from tensorferry.state import build

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


MIB = 1 << 20


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("trust", [False, True])
def test_every_leaf_comes_back_whole_and_as_a_part(trust, tmp_path):
    # In one checkpoint, since each is synchronised with the disk.
    leaves = [leaf for leaf in CATALOGUE.values() if not leaf.refused and leaf.trust == trust and not leaf.root]
    values = {leaf.name: leaf.value() for leaf in leaves}
    save_state(tmp_path / "c", {"leaves": values, "weight": torch.arange(6.0)})
    allowed = Allowed(trust=trust)
    whole = load_state(tmp_path / "c", allowed=allowed)
    expected = {leaf.name: leaf.expect(values[leaf.name]) for leaf in leaves}
    assert_same_state(whole["leaves"], expected)
    for first in range(0, len(leaves), 12):
        some, weight = leaves[first : first + 12], torch.zeros(6)
        asked = {"leaves": {**{leaf.name: None for leaf in some}, "absent": 5}, "weight": weight}
        state, missing = loading.read(tmp_path / "c", asked, allowed=allowed)
        assert state is asked
        assert missing == ["leaves.absent"]
        assert asked["leaves"].pop("absent") == 5
        assert asked["weight"] is weight
        assert weight.tolist() == [0, 1, 2, 3, 4, 5]
        assert_same_state(asked["leaves"], {leaf.name: expected[leaf.name] for leaf in some})


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors that torch's partial read gets wrong or refuses."""
    return {
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "strided": torch.arange(10)[::2],
        "channels_last": torch.arange(48.0).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(7.0),
        "parameter": nn.Parameter(torch.arange(4.0)),
        "sparse": torch.eye(3).to_sparse(),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("writer", ["ours", "torch"])
def test_odd_tensors_are_filled_in_place(writer, tmp_path):
    state = odd_tensors()
    save_by(writer, tmp_path / "c", state)
    asked = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}
    asked["sparse"] = torch.zeros(3, 3).to_sparse()
    asked["conj"] = torch.zeros(2, dtype=torch.complex64).conj()
    asked["parameter"] = nn.Parameter(torch.zeros(4))
    given = dict(asked)
    loaded = SyncCheckpointer().load(str(tmp_path / "c"), asked, strict=True)
    for name, value in state.items():
        assert loaded[name] is given[name], name
        assert torch.equal(loaded[name].detach().to_dense(), value.detach().to_dense()), name
        assert loaded[name].requires_grad == (name == "parameter")


@pytest.mark.filterwarnings("ignore")
def test_what_is_built_of_values_is_not_built_of_those_that_were_not_read(tmp_path, monkeypatch):
    """Indices of zero would be valid here, and memory that nobody has written to is mostly zero."""

    class Zeros(Unread):
        def __new__(cls, *args, **kwargs):
            return super().__new__(cls, *args, **kwargs).fill_(0)

    monkeypatch.setattr(build, "Unread", Zeros)
    value = torch.sparse_coo_tensor([[2], [1]], [5.0], (3, 3), check_invariants=False).coalesce()
    state = {"value": value, "other": torch.ones(3)}
    save_state(tmp_path / "c", state)
    for asked in ({"value": torch.zeros(3, 3).to_sparse()}, {"value": None}, {"value": None, "other": torch.zeros(3)}):
        loaded, missing = loading.read(str(tmp_path / "c"), asked)
        assert missing == []
        assert torch.equal(loaded["value"].to_dense(), value.to_dense())


@pytest.mark.parametrize("writer", ["ours", "torch"])
def test_missing_keys_stay_and_strict_names_them(writer, tmp_path):
    state = {"a": torch.ones(2), "b": {"c": 1, "l": [torch.ones(1), {"x": 2, "y": 3}], "h": [1, {"x": 2}]}}
    save_by(writer, tmp_path / "c", state)
    asked = {"a": torch.zeros(2), "b": {"z": 9, "l": [torch.zeros(1), {"x": 0, "q": 8}], "h": [0, {"q": 3}, 7]}}
    with pytest.raises(StateMismatch, match=r"b\.z"):
        load_state(tmp_path / "c", asked, strict=True)
    assert not asked["a"].any()
    loaded, missing = loading.read(tmp_path / "c", asked)
    assert sorted(missing) == ["b.l[1].q", "b.z"]
    assert loaded is asked
    assert asked["a"].tolist() == [1, 1]
    assert_same_state(asked["b"], {"z": 9, "l": [torch.ones(1), {"x": 2, "q": 8}], "h": [1, {"x": 2}]})


def test_only_what_is_wanted_is_read(tmp_path):
    """Damage in what nobody asks for is not noticed, because it is not read."""
    large = {f"w{i}": torch.full((MIB // 4,), float(i)) for i in range(4)}
    state = {"model": large, "views": {f"v{i}": torch.full((MIB // 2,), float(i))[::2] for i in range(2)}}
    save_state(tmp_path / "c", state)
    file = rank_file(tmp_path / "c")
    data = bytearray(file.read_bytes())
    for value in (3.0, 1.0):
        at = data.find(torch.full((4096,), value).numpy().tobytes())
        # Far from its neighbours, with which it shares a block.
        data[at + 8192] ^= 1
    file.write_bytes(data)
    asked = {"model": {"w0": torch.zeros(MIB // 4), "w2": None}, "views": {"v0": None}}
    load_state(tmp_path / "c", asked)
    assert asked["model"]["w2"].eq(2).all()
    assert asked["views"]["v0"].eq(0).all()
    for broken in ({"model": {"w3": None}}, {"views": {"v1": None}, "model": {"w1": None}}):
        with pytest.raises(CorruptCheckpoint):
            load_state(tmp_path / "c", broken)
    with pytest.raises(CorruptCheckpoint):
        load_state(tmp_path / "c")


def test_a_file_on_its_own_is_a_state_again(tmp_path):
    state = {"w": torch.arange(4.0), "v": torch.arange(6)[::2], "n": {"lr": 0.5}}
    save_state(tmp_path / "c", state)
    assert_same_state(load_file(rank_file(tmp_path / "c")), state)
    torch.save(state, tmp_path / "t.pt")
    assert_same_state(load_file(tmp_path / "t.pt"), state)
    # What curl would fetch from a transport.
    transport = HTTPTransport(timeout=timedelta(seconds=20))
    try:
        transport.send_checkpoint([1], 3, state, timedelta(seconds=20))
        with urllib.request.urlopen(transport.metadata() + "3.safetensors") as answer:
            (tmp_path / "curled.safetensors").write_bytes(answer.read())
    finally:
        transport.shutdown()
    assert_same_state(load_file(tmp_path / "curled.safetensors"), state)
    with pytest.raises(FileNotFoundError):
        load_file(tmp_path / "none.safetensors")


def test_a_keeper_is_asked_first_and_the_folder_is_what_remains(tmp_path, caplog):
    save_state(tmp_path / "c", {"w": torch.ones(3)})
    other = save_state(tmp_path / "other", {"w": torch.full((3,), 7.0)})
    asked = []

    def prefer(path, rank, world_size):
        asked.append((path, rank, world_size))
        return Stored.open(rank_file(other))

    assert load_state(tmp_path / "c", prefer=prefer)["w"].tolist() == [7, 7, 7]
    assert asked == [(str(tmp_path / "c"), 0, 1)]
    assert load_state(tmp_path / "c", prefer=lambda *_: None)["w"].tolist() == [1, 1, 1]

    def broken(*_):
        raise ProtocolError("it is gone")

    assert load_state(tmp_path / "c", prefer=broken)["w"].tolist() == [1, 1, 1]
    assert "it is gone" in caplog.text
    # What only a keeper has, and does not fit, is no missing checkpoint; what is in the folder may fit.
    kept = rank_file(save_state(tmp_path / "kept", {"w": torch.ones(2)}))
    with pytest.raises(StateMismatch, match="nothing was overwritten"):
        load_state(tmp_path / "none", {"w": torch.zeros(3)}, prefer=lambda *_: Stored.open(kept))
    loaded = load_state(tmp_path / "c", {"w": torch.zeros(3)}, prefer=lambda *_: Stored.open(kept))
    assert loaded["w"].tolist() == [1, 1, 1]
    assert "does not fit" in caplog.text


class _Unlisted:
    """A class that no allow-list names."""


def test_a_save_warns_once_of_what_a_load_will_refuse(tmp_path, caplog):
    save_state(tmp_path / "c", {"odd": _Unlisted()}, safe_globals=[_Unlisted])
    assert not caplog.records
    with closing(SyncCheckpointer()) as checkpointer:
        for name in "ab":
            checkpointer.save(tmp_path / name, {"odd": _Unlisted()})
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("a load will refuse this state: ")
    assert "safe_globals=[" in told
    with pytest.raises(UnsafePickle):
        load_state(tmp_path / "a")


def keyed(value: float, shift: int = 0) -> dict:
    """A state whose dicts have keys that are objects, in an order that ``shift`` turns."""
    keys = [(1, 2), (3, 4), 1.5, 2.5, frozenset({7}), frozenset({8, 9}), Colour.RED, b"ab", 1 << 70, "text"]
    turned = keys[shift:] + keys[:shift]
    tensors = {key: torch.full((2,), value * (1 + keys.index(key))) for key in turned}
    return {"deep": [tensors, {(key, 0): value * keys.index(key) for key in turned}], (0,): torch.full((3,), value)}


@pytest.mark.parametrize("dropped", [None, 2.5])
@pytest.mark.parametrize("door", [in_place_doors.folder, in_place_doors.transport, in_place_doors.archive])
def test_values_under_object_keys_land_under_their_own_key(door, dropped, tmp_path):
    target, expected = keyed(0.0, 3), keyed(1.0, 3)
    for one in (target, expected):
        one["deep"][0].pop(dropped, None)
        one["deep"][1].pop((dropped, 0), None)
    tensors = dict(target["deep"][0])
    state = door(keyed(1.0), target, tmp_path, [Colour])
    # What a transport brings is all of the source, in its order.
    assert_same_state(state, keyed(1.0) if door is in_place_doors.transport else expected)
    assert all(state["deep"][0][key] is tensor for key, tensor in tensors.items())


def test_keys_are_integers_of_any_size(tmp_path):
    keys = [2**53 - 1, 2**53, -(2**53) + 1, -(2**53), 2**63 - 1, -(2**63), -(2**63) - 1]
    state = {**{key: torch.tensor(float(n)) for n, key in enumerate(keys)}, 1: torch.ones(2)}
    assert_same_state(load_state(save_state(tmp_path / "c", state)), state)


@pytest.mark.parametrize("writer", ["ours", "torch"])
def test_map_location_is_that_of_torch_load(writer, tmp_path):
    state = {"w": torch.ones(3), "v": torch.arange(6.0)[::2], "p": nn.Parameter(torch.ones(2))}
    save_by(writer, tmp_path / "c", state)
    seen = []

    def note(storage, location):
        seen.append(location)
        return storage

    for given, device in [
        ("meta", "meta"),
        ({"cpu": "meta"}, "meta"),
        (note, "cpu"),
        (lambda *_: None, "cpu"),
        ({"cuda:0": "meta"}, "cpu"),
    ]:
        loaded = load_state(tmp_path / "c", map_location=given)
        assert {value.device.type for value in loaded.values()} == {device}, given
        assert loaded["v"].stride() == (2,)
        assert type(loaded["p"]) is nn.Parameter
    assert set(seen) == {"cpu"}


def test_the_device_that_was_saved_is_the_location(tmp_path, monkeypatch):
    base = torch.arange(12.0)
    state = {"w": torch.ones(3), "on": [torch.full((4,), 2.0), torch.full((5,), 3.0)], "base": base, "view": base[::2]}
    state["other"] = torch.full((2,), 4.0)
    with stand_in() as device:
        monkeypatch.setattr(checkpointers, "ACCELERATOR", device)
        device.adopt(*state["on"], base)
        device.adopt(state["other"], device=1)
        save_state(tmp_path / "c", state)
    monkeypatch.undo()
    seen = {}

    def note(storage, location):
        seen[storage.nbytes()] = location
        return storage

    load_state(tmp_path / "c", map_location=note)
    assert seen == {12: "cpu", 16: "cuda:0", 20: "cuda:0", 48: "cuda:0", 8: "cuda:1"}
    loaded = load_state(tmp_path / "c", map_location={"cuda:0": "meta", "cuda:1": "cpu"})
    assert {name: value.device.type for name, value in loaded.items() if name != "on"} == {
        "w": "cpu", "view": "meta", "base": "meta", "other": "cpu",
    }  # fmt: skip
    assert {value.device.type for value in loaded["on"]} == {"meta"}
    # In place, and to the CPU by name, no such device is needed.
    asked = {"view": torch.zeros(6), "other": None}
    load_state(tmp_path / "c", asked)
    assert (asked["view"].tolist(), asked["other"].tolist()) == ([0, 2, 4, 6, 8, 10], [4, 4])
    assert torch.equal(load_state(tmp_path / "c", map_location="cpu")["view"], base[::2])
    if not torch.cuda.is_available():
        with pytest.raises(InvalidArgument, match=r"cuda:0.*default_map_location"):
            load_state(tmp_path / "c")
        with pytest.raises(InvalidArgument, match=r"cuda:1"):
            load_state(tmp_path / "c", map_location={"cuda:0": "cpu"})


def test_a_file_of_torch_of_another_machines_devices_fills_a_state_of_the_cpu(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda _: "cuda:999")
        torch.save({"a": torch.arange(3.0), "b": torch.ones(2)}, tmp_path / "a.pt")
    asked = {"a": torch.zeros(3), "b": None}
    assert load_file(tmp_path / "a.pt", asked) is asked
    assert asked["a"].tolist() == [0, 1, 2]
    assert (asked["b"].tolist(), asked["b"].device.type) == ([1, 1], "cpu")
    with pytest.raises(TensorferryError):
        load_file(tmp_path / "a.pt")


class Stage(enum.Enum):
    FIRST = 1


@dataclass
class Config:
    value: Any


class Text:
    """Makes something else of its state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.value = str(state)


def noted() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(2))
    made.note = argparse.Namespace(a=1)
    return made


NAMESPACE = argparse.Namespace(a=1)


#: By name: a leaf, and the class in it that is not allowed, where ``Config`` and ``Text`` are.
LEAVES: dict[str, tuple[Any, str]] = {
    "object": (NAMESPACE, "argparse.Namespace"),
    "key": ({Stage.FIRST: torch.ones(3), "z": 2}, "Stage"),
    "parameter": (noted(), "argparse.Namespace"),
    "deep": (Config(collections.deque([(NAMESPACE, 1)])), "argparse.Namespace"),
}


SAFE = (Config, Text)


DOORS = pytest.mark.parametrize("door", [in_place_doors.folder, in_place_doors.archive])


@DOORS
@pytest.mark.parametrize("name", LEAVES)
def test_what_does_not_ask_for_it_loads(name: str, door: in_place_doors.Door, tmp_path: Path) -> None:
    leaf, refused = LEAVES[name]
    state = {"model": {"w": torch.arange(4.0)}, "x": leaf, "step": 5}
    found = door(state, {"model": {"w": torch.zeros(4)}, "step": 0}, tmp_path, SAFE)
    assert (found["model"]["w"].tolist(), found["step"], len(found)) == ([0, 1, 2, 3], 5, 2)
    asked = {"x": None, **({"x": {Stage.FIRST: torch.zeros(3)}} if name == "key" else {})}
    for target in (asked, None):
        with pytest.raises(UnsafePickle, match=refused):
            door(state, target, tmp_path, SAFE)
    if name == "key":
        assert not asked["x"][Stage.FIRST].any()


@DOORS
def test_one_error_names_all(door: in_place_doors.Door, tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "a": NAMESPACE, "b": Stage.FIRST, "c": [torch.__version__], "d": Config(NAMESPACE)}
    for target, names in ((None, {"a", "b", "c"}), ({"b": None, "c": None}, {"b", "c"}), ({"d": None}, {"a"})):
        with pytest.raises(UnsafePickle) as error:
            door(state, target, tmp_path, SAFE)
        text = str(error.value)
        assert text.count("Namespace") == 2 * ("a" in names), text
        assert text.count("Stage") == 2 * ("b" in names), text
        assert text.count("TorchVersion") == 2 * ("c" in names), text


@DOORS
def test_code_of_the_users_is_given_nothing_that_is_not_allowed(door: in_place_doors.Door, tmp_path: Path) -> None:
    """It could make a value of it in which nothing shows that."""
    state = {"w": torch.ones(3), "x": Text(NAMESPACE)}
    for target in ({"w": torch.zeros(3)}, {"x": None}, None):
        with pytest.raises(UnsafePickle, match=r"argparse\.Namespace"):
            door(state, target, tmp_path, SAFE)
