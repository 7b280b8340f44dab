"""``load``: what is read, where it goes, and what is refused; torch's own reader is the oracle where it is right."""

from __future__ import annotations

import argparse
import collections
import enum
import os
import pickle
import urllib.request
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint_loads import load_state, rank_file, save_by, save_state
from equality import assert_same_state
from leaves import CATALOGUE, Leaf
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


def compare(leaf: Leaf, value: object, found: object) -> None:
    try:
        assert_same_state(found, leaf.expect(value))
    except AssertionError as e:
        raise AssertionError(f"{leaf.name}: {e}") from e


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
    for leaf in leaves:
        compare(leaf, values[leaf.name], whole["leaves"][leaf.name])
    for first in range(0, len(leaves), 12):
        some, weight = leaves[first : first + 12], torch.zeros(6)
        asked = {"leaves": {**{leaf.name: None for leaf in some}, "absent": 5}, "weight": weight}
        state, missing = loading.read(tmp_path / "c", asked, allowed=allowed)
        assert state is asked
        assert missing == ["leaves.absent"]
        assert asked["leaves"].pop("absent") == 5
        assert asked["weight"] is weight
        assert weight.tolist() == [0, 1, 2, 3, 4, 5]
        assert list(asked["leaves"]) == [leaf.name for leaf in some]
        for leaf in some:
            compare(leaf, values[leaf.name], asked["leaves"][leaf.name])


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
@pytest.mark.parametrize("layout", ["same", "contiguous"])
def test_odd_tensors_are_filled_in_place(writer, layout, tmp_path):
    state = odd_tensors()
    save_by(writer, tmp_path / "c", state)
    asked = {}
    for name, value in state.items():
        if name == "sparse":
            asked[name] = torch.zeros(3, 3).to_sparse()
        elif layout == "same":
            asked[name] = torch.zeros_like(value) if name != "conj" else torch.zeros(2, dtype=torch.complex64).conj()
        else:
            asked[name] = torch.zeros(value.shape, dtype=value.dtype)
    asked["parameter"] = nn.Parameter(torch.zeros(4))
    given = dict(asked)
    loaded = SyncCheckpointer().load(str(tmp_path / "c"), asked, strict=True)
    for name, value in state.items():
        assert loaded[name] is given[name], name
        assert torch.equal(_plain(loaded[name]), _plain(value)), name
        assert loaded[name].requires_grad == (name == "parameter")


BUILT_OF_VALUES = {
    "coo": lambda: torch.sparse_coo_tensor([[2], [1]], [5.0], (3, 3), check_invariants=False).coalesce(),
    "csr": lambda: torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 5.0, 0.0]]).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", BUILT_OF_VALUES)
def test_what_is_built_of_values_is_not_built_of_those_that_were_not_read(kind, tmp_path, monkeypatch):
    """Indices of zero would be valid here, and memory that nobody has written to is mostly zero."""

    class Zeros(Unread):
        def __new__(cls, *args, **kwargs):
            return super().__new__(cls, *args, **kwargs).fill_(0)

    monkeypatch.setattr(build, "Unread", Zeros)
    value = BUILT_OF_VALUES[kind]()
    state = {"value": value, "other": torch.ones(3)}
    save_state(tmp_path / "c", state)
    # Targets of compressed layouts have to have as many elements as what is saved.
    elsewhere = torch.zeros(3, 3)
    elsewhere[0, 0] = kind != "coo"
    target = elsewhere.to_sparse(layout=value.layout)
    for asked in ({"value": target}, {"value": None}, {"value": None, "other": torch.zeros(3)}):
        loaded, missing = loading.read(str(tmp_path / "c"), asked)
        assert missing == []
        assert loaded["value"].layout == value.layout
        assert torch.equal(loaded["value"].to_dense(), value.to_dense())


def _plain(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.to_dense() if value.is_sparse else value


@pytest.mark.parametrize("writer", ["ours", "torch"])
@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"a": torch.zeros(2), "b": {"c": torch.zeros(3, dtype=torch.float64)}}, "b.c"),
        ({"a": torch.zeros(2), "b": {"c": torch.zeros(4)}}, "b.c"),
        ({"a": torch.zeros(2), "b": [torch.zeros(3)]}, "b: list here, dict"),
        ({"a": torch.zeros(2), "n": torch.zeros(1)}, "n: Tensor here, int"),
        ({"a": torch.zeros(2), "t": (torch.zeros(1), 2, 3)}, "t: a tuple of 3 here, of 2"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_overwritten(writer, asked, named, tmp_path):
    state = {"a": torch.ones(2), "b": {"c": torch.ones(3)}, "n": 5, "t": (torch.ones(1), 2)}
    save_by(writer, tmp_path / "c", state)
    with pytest.raises(StateMismatch, match="nothing was overwritten") as raised:
        load_state(tmp_path / "c", asked)
    assert named in str(raised.value)
    assert isinstance(raised.value, RuntimeError)
    assert not any(value.any() for value in asked.values() if isinstance(value, torch.Tensor))


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


def test_containers_of_every_kind_are_asked_for(tmp_path):
    state = {
        "o": OrderedDict(a=torch.ones(1), b=torch.ones(2)),
        "t": (torch.ones(1), [torch.ones(2)]),
        "q": deque([1, torch.ones(2)], maxlen=5),
        1: torch.ones(3),
        "model": nn.Linear(2, 2).state_dict(),
    }
    save_state(tmp_path / "c", state)
    inner = torch.zeros(1)
    asked = {"o": {"b": None}, "t": (inner, [None]), "q": deque([0, torch.zeros(2)]), 1: torch.zeros(3)}
    load_state(tmp_path / "c", asked)
    assert list(asked["o"]) == ["b"]
    assert asked["t"][0] is inner
    assert inner.item() == 1
    assert asked["t"][1][0].tolist() == [1, 1]
    assert asked["q"][1].tolist() == [1, 1]
    assert asked[1].tolist() == [1, 1, 1]


def test_only_what_is_wanted_is_read(tmp_path):
    """Damage in what nobody asks for is not noticed, because it is not read."""
    large = {f"w{i}": torch.full((MIB // 4,), float(i)) for i in range(4)}
    state = {"model": large, "views": {f"v{i}": torch.full((MIB // 2,), float(i))[::2] for i in range(2)}}
    save_state(tmp_path / "c", state)
    file = rank_file(tmp_path / "c")
    stored = Stored.open(file)
    numbers = {name: i for i, name in enumerate(stored.names)}
    data = bytearray(file.read_bytes())
    for value in (3.0, 1.0):
        at = data.find(torch.full((4096,), value).numpy().tobytes())
        # Far from its neighbours, with which it shares a block.
        data[at + 8192] ^= 1
    file.write_bytes(data)
    assert len(numbers) >= 8
    asked = {"model": {"w0": torch.zeros(MIB // 4), "w2": None}, "views": {"v0": None}}
    load_state(tmp_path / "c", asked)
    assert asked["model"]["w2"].eq(2).all()
    assert asked["views"]["v0"].eq(0).all()
    for broken in ({"model": {"w3": None}}, {"views": {"v1": None}, "model": {"w1": None}}):
        with pytest.raises(CorruptCheckpoint):
            load_state(tmp_path / "c", broken)
    with pytest.raises(CorruptCheckpoint):
        load_state(tmp_path / "c")


def test_a_pickle_that_names_what_it_must_not_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    (tmp_path / "c").mkdir()
    torch.save({"w": torch.ones(2), "e": Evil()}, tmp_path / "c" / "checkpoint_0.pt")
    save_state(tmp_path / "d", {"w": torch.ones(2), "e": Evil()})
    for folder in ("c", "d"):
        for asked in (None, {"w": torch.zeros(2), "e": None}):
            with pytest.raises(UnsafePickle, match="system"):
                load_state(tmp_path / folder, asked)
        assert load_state(tmp_path / folder, {"w": torch.zeros(2)})["w"].tolist() == [1, 1]
    (tmp_path / "c" / "checkpoint_0.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(TensorferryError):
        load_state(tmp_path / "c")
    assert not (tmp_path / "ran").exists()


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
    asked = {"w": torch.zeros(4)}
    assert load_file(tmp_path / "curled.safetensors", asked) is asked
    assert asked["w"].tolist() == [0, 1, 2, 3]
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


class _Unlisted:
    """A class that no allow-list names."""


def test_a_save_warns_once_of_what_a_load_will_refuse(tmp_path, caplog):
    state = {"step": 3, "odd": _Unlisted()}
    with closing(SyncCheckpointer(rank=0, world_size=1)) as checkpointer, caplog.at_level("INFO"):
        for name in ("a", "b"):
            checkpointer.save(str(tmp_path / name), state)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
        assert lines[0].startswith("a load will refuse this state: ")
        assert "safe_globals=[" in lines[0]
        with pytest.raises(UnsafePickle):
            checkpointer.load(str(tmp_path / "a"))
    caplog.clear()
    listed = SyncCheckpointer(rank=0, world_size=1, safe_globals=[_Unlisted])
    with closing(listed) as checkpointer, caplog.at_level("INFO"):
        checkpointer.save(str(tmp_path / "c"), state)
        assert isinstance(checkpointer.load(str(tmp_path / "c"))["odd"], _Unlisted)
    assert not caplog.records


def test_a_state_that_only_a_keeper_has_and_that_does_not_fit_is_no_missing_checkpoint(tmp_path, caplog):
    kept = save_state(tmp_path / "kept", {"w": torch.ones(3)})
    save_state(tmp_path / "c", {"w": torch.ones(2)})

    def prefer(*_):
        return Stored.open(rank_file(kept))

    with pytest.raises(StateMismatch, match="nothing was overwritten"):
        load_state(tmp_path / "none", {"w": torch.zeros(2)}, prefer=prefer)
    # What is in the folder may fit.
    assert load_state(tmp_path / "c", {"w": torch.zeros(2)}, prefer=prefer)["w"].tolist() == [1, 1]
    assert "does not fit" in caplog.text


def keyed(value: float, shift: int = 0) -> dict:
    """A state whose dicts have keys that are objects, in an order that ``shift`` turns."""
    keys = [(1, 2), (3, 4), 1.5, 2.5, frozenset({7}), frozenset({8, 9}), Colour.RED, b"ab", 1 << 70, "text"]
    turned = keys[shift:] + keys[:shift]
    tensors = {key: torch.full((2,), value * (1 + keys.index(key))) for key in turned}
    return {"deep": [tensors, {(key, 0): value * keys.index(key) for key in turned}], (0,): torch.full((3,), value)}


@pytest.mark.parametrize("dropped", [None, (1, 2), 2.5, Colour.RED])
@pytest.mark.parametrize("shift", [0, 3])
def test_values_under_object_keys_land_under_their_own_key(shift, dropped, tmp_path):
    save_state(tmp_path / "c", keyed(1.0))
    torch.save(keyed(1.0), tmp_path / "f.pt")
    allowed = Allowed([Colour])
    for load_into in (
        lambda target: loading.read(tmp_path / "c", target, allowed=allowed),
        lambda target: load_file(tmp_path / "f.pt", target, safe_globals=[Colour]),
        lambda target: load_file(rank_file(tmp_path / "c"), target, safe_globals=[Colour]),
        lambda target: SyncCheckpointer(safe_globals=[Colour]).load(tmp_path / "c", target),
    ):
        target, expected = keyed(0.0, shift), keyed(1.0, shift)
        for one in (target, expected):
            one["deep"][0].pop(dropped, None)
            one["deep"][1].pop((dropped, 0), None)
        tensors = dict(target["deep"][0])
        found = load_into(target)
        state, missing = found if isinstance(found, tuple) else (found, [])
        assert missing == []
        assert_same_state(state, expected)
        assert all(state["deep"][0][key] is tensor for key, tensor in tensors.items())


@pytest.mark.parametrize("key", [2**53 - 1, 2**53, -(2**53) + 1, -(2**53), 2**63 - 1, -(2**63), -(2**63) - 1])
def test_keys_are_integers_of_any_size(key, tmp_path):
    state = {key: torch.arange(3.0), 1: torch.ones(2)}
    loaded = load_state(save_state(tmp_path / "c", state))
    assert_same_state(state, loaded)


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
        (torch.device("meta"), "meta"),
        ({"cpu": "meta"}, "meta"),
        (note, "cpu"),
        (lambda *_: None, "cpu"),
        ("cpu", "cpu"),
        ({"cuda:0": "meta"}, "cpu"),
    ]:
        loaded = load_state(tmp_path / "c", map_location=given)
        assert {value.device.type for value in loaded.values()} == {device}, given
        assert loaded["v"].stride() == (2,)
        assert type(loaded["p"]) is nn.Parameter
    assert set(seen) == {"cpu"}
    if writer == "ours":
        own = torch.zeros(3)
        load_state(tmp_path / "c", asked := {"w": own, "v": None}, map_location="meta")
        assert own.tolist() == [1, 1, 1]
        assert asked["v"].device.type == "meta"


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


class Scaled(torch.Tensor):
    pass


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
    "tensor": (torch.ones(3).as_subclass(Scaled), "Scaled"),
    "parameter": (noted(), "argparse.Namespace"),
    "in an object": (Config([NAMESPACE]), "argparse.Namespace"),
    "in containers": (collections.OrderedDict(a=collections.deque([(NAMESPACE, 1)])), "argparse.Namespace"),
}


SAFE = (Config, Text)


def as_checkpoint(state: Any, folder: Path) -> Callable[..., Any]:
    SyncCheckpointer().save(folder / "checkpoint", state)
    return lambda target=None: SyncCheckpointer(safe_globals=SAFE).load(folder / "checkpoint", target)


def as_archive(state: Any, folder: Path) -> Callable[..., Any]:
    torch.save(state, folder / "state.pt")
    return lambda target=None: load_file(folder / "state.pt", target, safe_globals=SAFE)


DOORS = pytest.mark.parametrize("door", [as_checkpoint, as_archive])


@DOORS
@pytest.mark.parametrize("name", LEAVES)
def test_what_does_not_ask_for_it_loads(name: str, door: Callable[..., Any], tmp_path: Path) -> None:
    leaf, refused = LEAVES[name]
    load = door({"model": {"w": torch.arange(4.0)}, "x": leaf, "step": 5}, tmp_path)
    found = load({"model": {"w": torch.zeros(4)}, "step": 0})
    assert (found["model"]["w"].tolist(), found["step"], len(found)) == ([0, 1, 2, 3], 5, 2)
    asked = {"x": None, **({"x": {Stage.FIRST: torch.zeros(3)}} if name == "key" else {})}
    for target in (asked, None):
        with pytest.raises(UnsafePickle, match=refused):
            load(target)
    if name == "key":
        assert not asked["x"][Stage.FIRST].any()


@DOORS
def test_one_error_names_all(door: Callable[..., Any], tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "a": NAMESPACE, "b": Stage.FIRST, "c": [torch.__version__], "d": Config(NAMESPACE)}
    load = door(state, tmp_path)
    for target, names in ((None, {"a", "b", "c"}), ({"b": None, "c": None}, {"b", "c"}), ({"d": None}, {"a"})):
        with pytest.raises(UnsafePickle) as error:
            load(target)
        text = str(error.value)
        assert text.count("Namespace") == 2 * ("a" in names), text
        assert text.count("Stage") == 2 * ("b" in names), text
        assert text.count("TorchVersion") == 2 * ("c" in names), text


@DOORS
def test_code_of_the_users_is_given_nothing_that_is_not_allowed(door: Callable[..., Any], tmp_path: Path) -> None:
    """It could make a value of it in which nothing shows that."""
    load = door({"w": torch.ones(3), "x": Text(NAMESPACE)}, tmp_path)
    for target in ({"w": torch.zeros(3)}, {"x": None}, None):
        with pytest.raises(UnsafePickle, match=r"argparse\.Namespace"):
            load(target)
