"""``load`` and the devices of what was saved: ``map_location``, and where tensors go without it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from checkpoint_loads import load_state, save_by, save_state
from stand_in import stand_in
from tensorferry.checkpointing import checkpointers, load_file
from tensorferry.errors import InvalidArgument, TensorferryError

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


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
