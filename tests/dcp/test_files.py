"""Checkpoints in folders: their contents, crashes and damage, and every way in which torch uses them."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import Job, context
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from indexes import written_with
from nights import mostly_at_night
from tensorferry._native import Index
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter, own_errors
from tensorferry.errors import ProtocolError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is:UserWarning", "ignore:TypedStorage is:UserWarning", "ignore::FutureWarning"
)


def model(seed):
    torch.manual_seed(seed)
    found = torch.nn.Sequential(torch.nn.Linear(96, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 3))
    optimizer = torch.optim.AdamW(found.parameters(), lr=0.1 * (seed + 1))
    found(torch.randn(5, 96)).sum().backward()
    optimizer.step()
    return found, optimizer


class Counter:
    """Has a state of its own, as torch's ``Stateful`` objects do."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "history": torch.arange(self.value)}

    def load_state_dict(self, state):
        self.value = state["value"]


def everything(seed):
    found, optimizer = model(seed)
    state = dict(zip(("model", "optimizer"), get_state_dict(found, optimizer), strict=True))
    state["counter"] = Counter(5)
    state["counter"].value += seed
    return found, optimizer, state | {"step": seed, "nested": [{"a": torch.full((3,), seed)}, (1, "x")]}


def leaves(tree):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def test_a_whole_training_state_comes_back_in_place(tmp_path):
    _, _, saved = everything(1)
    dcp.save(saved, storage_writer=FileWriter(tmp_path / "ck"))
    other, optimizer, state = everything(2)
    state["counter"].value = 6
    places = [leaf.data_ptr() for leaf in leaves(state)]
    dcp.load(state, storage_reader=FileReader(tmp_path / "ck"))
    assert [leaf.data_ptr() for leaf in leaves(state)] == places
    assert all(map(torch.equal, leaves(saved["model"]), leaves(state["model"])))
    set_state_dict(other, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    assert (state["counter"].value, state["step"], state["nested"][1]) == (6, 1, (1, "x"))


def test_the_files_are_safetensors_files(tmp_path):
    weight, odd = torch.randn(7, 9), torch.randn(3, dtype=torch.complex128)
    dcp.save({"a": {"weight": weight}, "odd": odd, "text": "x"}, storage_writer=FileWriter(tmp_path))
    (rank,) = tmp_path.glob("rank00000-*.safetensors")
    with safe_open(rank, "pt") as file:
        assert torch.equal(file.get_tensor("a.weight"), weight)
        assert torch.equal(file.get_tensor("odd").view(torch.complex128), odd)
        assert sorted(file.keys()) == [
            "__tensorferry__/digests", "__tensorferry__/objects/2", "a.weight", "odd",
        ]  # fmt: skip
    with safe_open(tmp_path / "index.safetensors", "pt") as file:
        index = Index.decode(bytes(file.get_tensor("__tensorferry__/index").numpy()), 1)
    assert index.item(index.find("a.weight"))[2:4] == ("float32", (7, 9))
    assert index.keys == ["a.weight", "odd", "text"]


def test_values_are_cast_as_torch_casts_them(tmp_path):
    saved = {"f": torch.tensor([1.5, -2.75, 70000.0]), "i": torch.tensor([1, 300, -1]), "t": torch.randn(40, 30)}
    dcp.save(saved, storage_writer=FileWriter(tmp_path / "ours"))
    dcp.save(saved, checkpoint_id=tmp_path / "theirs")
    targets = {
        "f": [torch.float16, torch.float64, torch.int32, torch.bool],
        "i": [torch.int8, torch.float32, torch.bool],
        "t": [torch.float32, torch.bfloat16],
    }
    for name, dtype in [(name, dtype) for name, dtypes in targets.items() for dtype in dtypes]:
        blank = torch.zeros(saved[name].shape[::-1], dtype=dtype)
        ours, theirs = {name: blank.clone().t()}, {name: blank.clone().t()}
        dcp.load(ours, storage_reader=FileReader(tmp_path / "ours"))
        dcp.load(theirs, checkpoint_id=tmp_path / "theirs")
        assert torch.equal(ours[name], theirs[name]), (name, dtype)


def test_targets_of_any_layout_are_filled_and_nothing_beside_them(tmp_path):
    base = torch.arange(24 * 1000.0).view(24, 1000)
    pairs = torch.view_as_complex(torch.randn(5, 2))
    saved = {"rows": base, "tiny": base[:, :3].clone(), "tied": base[:3], "neg": pairs}
    saved["neg"] = saved["neg"].conj()
    dcp.save(saved, storage_writer=FileWriter(tmp_path))
    around = torch.full((40, 2000), -1.0)
    shared = torch.zeros(30, 1000)
    found = {
        "rows": around[5:29, 300:1300],
        "tiny": torch.zeros(3, 24).t(),
        "tied": shared[:3],
        "neg": torch.zeros(5, dtype=torch.complex64),
    }
    dcp.load(found, storage_reader=FileReader(tmp_path))
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    around[5:29, 300:1300] = -1
    assert (around == -1).all()
    # Two names for one memory: the last one wins, as with torch's reader, and values are not mixed.
    found = {"rows": shared[:24], "tied": shared[1:4]}
    dcp.load(found, storage_reader=FileReader(tmp_path))
    assert torch.equal(shared[4:24], base[4:])
    expanded = {"tied": torch.zeros(1, 1000).expand(3, 1000)}
    with pytest.raises(dcp.CheckpointException, match=r"tied: .*share one place"):
        dcp.load(expanded, storage_reader=FileReader(tmp_path))


def test_what_does_not_fit_is_refused(tmp_path):
    dcp.save({"a": torch.ones(4), "b": "text"}, storage_writer=FileWriter(tmp_path))
    for wrong, words in (({"a": torch.ones(5)}, "Size mismatch"), ({"c": torch.ones(4)}, "Missing key")):
        with pytest.raises(dcp.CheckpointException, match=words):
            dcp.load(wrong, storage_reader=FileReader(tmp_path))
    partial = {"a": torch.zeros(4), "c": torch.full((2,), 3.0)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(partial, storage_reader=FileReader(tmp_path), planner=planner)
    assert partial["a"].tolist() == [1] * 4
    assert partial["c"].tolist() == [3, 3]
    found = {"b": ""}
    dcp.load(found, storage_reader=FileReader(tmp_path))
    assert found == {"b": "text"}


def test_without_a_checkpoint_the_reason_is_named(tmp_path):
    def refusal(path):
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.load({"a": torch.ones(1)}, storage_reader=FileReader(path))
        return str(caught.value)

    assert f"{tmp_path / 'gone'} is not a folder" in refusal(tmp_path / "gone")
    assert "it has no index.safetensors" in refusal(tmp_path)
    dcp.save({"a": torch.ones(1)}, storage_writer=FileWriter(tmp_path / "ours"))
    (rank,) = (tmp_path / "ours").glob("rank*")
    for name in ("index.safetensors", ".metadata"):
        (tmp_path / "ours" / name).unlink()
    text = refusal(tmp_path / "ours")
    assert "incomplete checkpoint" in text
    assert rank.name in text
    dcp.save({"a": torch.ones(1)}, storage_writer=FileWriter(tmp_path / "again"))
    (rank,) = (tmp_path / "again").glob("rank*")
    rank.unlink()
    assert rank.name in refusal(tmp_path / "again")


def test_every_damaged_block_is_named_with_file_and_tensor(tmp_path):
    saved = {f"layer{i}.weight": torch.randn(90, 50) for i in range(4)}
    dcp.save(saved, storage_writer=FileWriter(tmp_path))
    (rank,) = tmp_path.glob("rank*")
    good = rank.read_bytes()
    rows = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])
    start = 8 + int.from_bytes(good[:8], "little")
    generator = random.Random(3)
    for name in saved:
        first, end = rows[name]["data_offsets"]
        at = generator.randrange(first, end)
        damaged = bytearray(good)
        damaged[start + at] ^= 1 << generator.randrange(8)
        rank.write_bytes(damaged)
        found = {key: torch.zeros(90, 50) for key in saved}
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.load(found, storage_reader=FileReader(tmp_path))
        text = str(caught.value)
        assert rank.name in text
        assert name in text
        assert f"block {at // 512} " in text
    rank.write_bytes(good)
    index = tmp_path / "index.safetensors"
    good = index.read_bytes()
    damaged = bytearray(good)
    damaged[4096 + 200] ^= 4
    index.write_bytes(damaged)
    with pytest.raises(dcp.CheckpointException, match=r"index\.safetensors: corrupt: block 0"):
        dcp.load({"layer0.weight": torch.zeros(90, 50)}, storage_reader=FileReader(tmp_path))


def _save_for_ever(folder, pipe):
    torch.set_num_threads(1)
    number = 0
    while True:
        number += 1
        state = {f"t{i}": torch.full((60_000 + i,), number) for i in range(6)} | {"number": number}
        dcp.save(state, storage_writer=FileWriter(folder), no_dist=True)
        pipe.send(number)


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_kill_at_any_moment_loses_nothing_and_leaves_nothing_wrong(tmp_path, pytestconfig):
    generator = random.Random(5)
    for _ in range(pytestconfig.getoption("--kills")):
        ours, theirs = context().Pipe(duplex=False)
        process = context().Process(target=_save_for_ever, args=(tmp_path, theirs))
        process.start()
        theirs.close()
        last = ours.recv()
        time.sleep(generator.random() * 0.08)
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while ours.poll():
                last = ours.recv()
        ours.close()
        state = {f"t{i}": torch.zeros(60_000 + i, dtype=torch.int64) for i in range(6)} | {"number": 0}
        dcp.load(state, storage_reader=FileReader(tmp_path))
        # The next save may have completed although its message had not arrived.
        assert state["number"] in (last, last + 1), "an older checkpoint came back"
        assert all((state[f"t{i}"] == state["number"]).all() for i in range(6))


def _async(kept, folder, kind):
    del kept
    rank = torch.distributed.get_rank()
    state = {"w": torch.full((100, 3), 4.0), "rank": torch.arange(5)}
    writer = FileWriter(folder)
    kind = dcp.state_dict_saver.AsyncCheckpointerType(kind)
    saving = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
    state["w"].zero_()  # staged already
    saving.result()
    found = {"w": torch.zeros(100, 3), "rank": torch.zeros(5, dtype=torch.int64)}
    dcp.load(found, storage_reader=FileReader(folder))
    return rank, found["w"].unique().tolist(), found["rank"].tolist()


@pytest.mark.process
@pytest.mark.parametrize("kind", mostly_at_night(["thread", "process"]))
def test_async_save(kind, tmp_path):
    # Daemonic processes cannot have children, and these ranks need a process for their checkpoints.
    with Job(2, daemon=False) as job:
        results = job.run(_async, tmp_path / "ck", kind)
    assert results == [(rank, [4.0], [0, 1, 2, 3, 4]) for rank in range(2)]


def test_slices_cost_hardly_more_than_themselves(tmp_path):
    whole, writer = torch.arange(1001.0 * 4096).view(1001, 4096), PeerWriter(interface="127.0.0.1")
    for one in (FileWriter(tmp_path), writer):
        dcp.save({"w": whole}, storage_writer=one, no_dist=True)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        for dim, reader in itertools.product((0, 1), (FileReader(tmp_path), PeerReader(writer.metadata()))):
            part = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(dim)], src_data_rank=None)
            dcp.load({"w": part}, storage_reader=reader, no_dist=True)
            expected = whole.chunk(2, dim)[1]
            assert torch.equal(part.to_local(), expected)
            assert reader.report["wanted"] == expected.numel() * 4
            assert reader.report["bytes"] <= 1.05 * reader.report["wanted"], reader.report
    finally:
        dist.destroy_process_group()
        writer.shutdown()


#: Columns that make no sense, of an index of one float32 tensor of 4 x 3.
SENSELESS = {
    "a chunk outside": {"boxes": [1, 0, 4, 3]},
    "a chunk far outside": {"boxes": [-1, 0, 4, 3]},
    "a chunk of other rank": {"boxes": [0, 4]},
    "a chunk too few": {"chunks": [2]},
    "a file that is not there": {"file": [1]},
    "an entry that is not there": {"entry": [7]},
    "a length beyond all": {"bytes": [-48]},
    "another kind": {"kind": [4]},
    "an object": {"kind": [2]},
    "a kind of peers": {"kind": [3]},
    "a layout that is not there": {"kind": [8]},
    "another dtype": {"dtypes": ["int32"]},
    "too few bytes": {"bytes": [44]},
    "text that is none": {"keys": [b"\xff"]},
    "terabytes with a dimension of 0": {"shape": [0, 2**62]},
    "a dtype that is none": {"dtypes": ["os"]},
    "strides that are none": {"flags": [2], "strides": [3, 2**63]},
    "as many dtypes": {"dtypes": [f"d{n}" for n in range(300)]},
}  # fmt: skip


@pytest.mark.parametrize("name", SENSELESS)
def test_an_index_that_makes_no_sense_is_a_protocol_error(name, tmp_path, monkeypatch):
    """These faults, which tests/support/fuzzing.py need not hit, would make torch or the reader use wrong values."""
    written_with(monkeypatch, lambda columns: columns.update(SENSELESS[name]))
    dcp.save({"x": torch.ones(4, 3)}, storage_writer=FileWriter(tmp_path))
    with pytest.raises(ProtocolError), own_errors():
        dcp.load({"x": torch.zeros(4, 3)}, storage_reader=FileReader(tmp_path))


def test_bytes_are_not_taken_for_elements_of_another_size(tmp_path, monkeypatch):
    written_with(monkeypatch, lambda columns: columns.update(dtypes=["complex64"]))
    dcp.save({"x": torch.ones(3, dtype=torch.complex128)}, storage_writer=FileWriter(tmp_path))
    found = {"x": torch.zeros(3, dtype=torch.complex64)}
    with pytest.raises(ProtocolError, match=r"the index says torch\.complex64"), own_errors():
        dcp.load(found, storage_reader=FileReader(tmp_path))


@pytest.mark.parametrize("path", ['["x",1000000000000]', "7", "[", "[0.5]", "[" * 10_000])
def test_a_path_that_leads_far_out_is_a_protocol_error(path, tmp_path, monkeypatch):
    written_with(monkeypatch, lambda columns: columns.update(paths=[path]))
    dcp.save({"x": torch.ones(4, 3)}, storage_writer=FileWriter(tmp_path))
    metadata = FileReader(tmp_path).read_metadata()
    with pytest.raises(ProtocolError, match="invalid path"):
        _ = metadata.planner_data
