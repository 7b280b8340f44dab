"""``load``: what is read, where it goes, and what is refused; torch's own reader is the oracle where it is right."""

from __future__ import annotations

import os
import pickle
import urllib.request
from collections import OrderedDict, deque
from contextlib import closing
from datetime import timedelta

import pytest
import torch
from torch import nn

from checkpoint_loads import load_state, rank_file, save_by, save_state
from equality import assert_same_state
from leaves import CATALOGUE, Leaf
from tensorferry import HTTPTransport
from tensorferry._native import Stored
from tensorferry.checkpointing import SyncCheckpointer, load_file, loading
from tensorferry.errors import (
    CorruptCheckpoint,
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
@pytest.mark.parametrize("writer", ["ours", "torch"])
@pytest.mark.parametrize("kind", BUILT_OF_VALUES)
def test_what_is_built_of_values_is_not_built_of_those_that_were_not_read(kind, writer, tmp_path, monkeypatch):
    """Indices of zero would be valid here, and memory that nobody has written to is mostly zero."""

    class Zeros(Unread):
        def __new__(cls, *args, **kwargs):
            return super().__new__(cls, *args, **kwargs).fill_(0)

    monkeypatch.setattr(loading, "Unread", Zeros)
    monkeypatch.setattr(build, "Unread", Zeros)
    value = BUILT_OF_VALUES[kind]()
    state = {"value": value, "other": torch.ones(3)}
    save_by(writer, tmp_path / "c", state)
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


# ---- what ours do with torch's files


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
