"""Checkpoints in a bucket are saved, replaced and loaded as in a folder, and their bytes are the same."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_doors import load, save

from stores import client, objects, put_folder
from tensorferry.dcp import FileReader, FileWriter, own_errors
from tensorferry.errors import IncompleteCheckpoint, TransferCancelled
from tensorferry.storage.objects import upload

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def some_state(seed=0):
    torch.manual_seed(seed)
    return {f"w{i}": torch.randn(64, 33 + i) for i in range(5)} | {"half": torch.randn(7).bfloat16()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]), key


@pytest.mark.process
def test_what_is_saved_is_loaded(any_server):
    state = some_state(1)
    save(state, any_server.place)
    assert_same(load(state, any_server.place), state)
    names = [key.rpartition("/")[2] for key in objects(any_server.url, any_server.prefix)]
    assert sorted(name[:5] for name in names) == [".meta", "index", "rank0"]


@pytest.mark.process
def test_a_large_state_goes_in_parts(any_server, monkeypatch):
    monkeypatch.setattr(upload, "PART", 5 << 20)
    state = {**some_state(2), "large": torch.randn(3, 1 << 20), "larger": torch.randn(1 << 20).double()}
    reported = []
    save(state, any_server.place, progress=lambda *now: reported.append(now))
    assert reported[-1][0] == reported[-1][1] > 20 << 20
    into, reader = {name: torch.zeros_like(one) for name, one in state.items()}, FileReader(any_server.place)
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert_same(into, state)
    assert reader.report["wanted"] <= reader.report["bytes"] <= 1.05 * reader.report["wanted"]


@pytest.mark.waits
@pytest.mark.parametrize("back", [False, True], ids=["changed", "changed and changed back"])
def test_a_tensor_that_changes_while_it_is_sent_does_no_harm(gateway, server, back, monkeypatch):
    monkeypatch.setattr(upload, "PART", 5 << 20)
    state = {**some_state(1), "w": torch.zeros(5 << 20)}

    def change_back(answer):
        state["w"][::1000] -= 1
        return answer

    def act(_, method, path):
        if method == "PUT" and "/rank" in path:
            state["w"][::1000] += 1
            return change_back if back else None
        return None

    gateway.act = act
    save(state, server.place, threads=1)
    gateway.act = lambda *_: None
    # Each part is what it was when it was copied, and matches its checksums.
    loaded = load(state, server.place)["w"]
    assert not loaded[: 4 << 18].any()
    assert loaded.max() <= 5


@pytest.mark.process
def test_a_checkpoint_of_torch_is_read(any_server, tmp_path):
    state = some_state(7)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    put_folder(any_server.url, tmp_path / "theirs", any_server.prefix)
    assert_same(load(state, any_server.place), state)


def test_an_object_that_is_missing_is_named(server):
    state = some_state(9)
    save(state, server.place)
    key = next(k for k in objects(server.url, server.prefix) if "/rank" in k)
    client(server.url).delete_object(Bucket="bucket", Key=key)
    with pytest.raises(IncompleteCheckpoint, match="its index names rank00000"):
        load(state, server.place)


def test_a_save_that_goes_on_has_a_deadline_of_its_own(server):
    """As one of Megatron's, which another process writes, and which is committed long after."""

    class Late(FileWriter):
        def finish(self, metadata, results):
            self._save.path.end()
            if goes_on:
                self.go_on()
            super().finish(metadata, results)

    for goes_on in (False, True):
        with contextlib.nullcontext() if goes_on else pytest.raises(TransferCancelled), own_errors():
            dcp.save({"w": torch.ones(3)}, storage_writer=Late(server.place), no_dist=True)
    assert torch.equal(load({"w": torch.zeros(3)}, server.place)["w"], torch.ones(3))
