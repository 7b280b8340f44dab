"""Tensors of every dtype, layout and kind: saved and loaded bit for bit, or refused by the save or before a load."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from job import Job
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from nights import mostly_at_night
from tensorferry import StateMismatch
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter, own_errors
from tensorferry.errors import RankFailed, UnsupportedLeaf

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
]

#: What rebuilds quantised tensors, which hardly any state has.
QUANTISING = [torch._utils._rebuild_qtensor]
QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def quantised(dtype, count=4):
    values = torch.arange(count, dtype=torch.float32)
    return torch.quantize_per_tensor(values, 1.0, 0, dtype)


def of_dtype(dtype):
    """Returns a tensor of 4 elements, with bytes that are not all the same where that is possible."""
    if dtype in QUANTISED:
        return quantised(dtype)
    if dtype == torch.bool:
        return torch.tensor([True, False, True, True])
    try:
        return torch.arange(1, 4 * dtype.itemsize + 1, dtype=torch.uint8).view(dtype)
    except Exception:
        return torch.empty(4, dtype=dtype)


def sparse(values, device="cpu"):
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]], device=device), values, (3,))


def fake():
    with FakeTensorMode():
        return torch.ones(3)


def freed():
    made = torch.zeros(4)
    made.untyped_storage().resize_(0)
    return made


#: Makes each kind of tensor.
KINDS = {
    **{str(dtype)[6:]: lambda dtype=dtype: of_dtype(dtype) for dtype in DTYPES},
    "per channel": lambda: torch.quantize_per_channel(
        torch.arange(4.0).view(2, 2), torch.ones(2), torch.zeros(2, dtype=torch.long), 0, torch.qint8
    ),
    "sparse": lambda: sparse(torch.tensor([1.0, 2.0])),
    "sparse, float8": lambda: sparse(torch.ones(2).to(torch.float8_e5m2)),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "mkldnn": lambda: torch.eye(4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
    "meta": lambda: torch.empty(3, device="meta"),
    "meta, sparse": lambda: sparse(torch.empty(2, device="meta"), "meta"),
    "fake": fake,
    "freed": freed,
    "zeros without memory": lambda: torch._efficientzerotensor(8),
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
}


def copies(dtype):
    """Returns whether this torch copies elements of a dtype at all."""
    try:
        of_dtype(dtype).clone().copy_(of_dtype(dtype))
    except RuntimeError:
        return False
    return True


#: Those that no load could put anywhere.
REFUSED = {
    *(() if copies(torch.float4_e2m1fn_x2) else ("float4_e2m1fn_x2",)),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *("quint4x2", "quint2x4", "meta", "meta, sparse"),
    *("mkldnn", "fake", "functional", "freed", "zeros without memory"),
}
#: Those that each change is tested with.
BY_DAY = {"bits8", "float4_e2m1fn_x2", "qint8", "sparse", "csr", "int4", "quint4x2", "quint2x4", "meta", "freed"}
#: Those to which no planner of torch gives a place.
UNPLANNED = {"nested", "jagged"}


def values_of(value):
    """Returns the strided tensor with the stored elements of another one."""
    if value.is_quantized:
        return value.int_repr()
    return value if value.layout is torch.strided else value._values() if value.is_sparse else value.values()


def content(value):
    """Returns the bytes of a tensor."""
    return values_of(value).reshape(-1).view(torch.uint8).tolist()


def blank(value):
    """Returns a tensor of the same kind with other elements."""
    if value.is_quantized:
        return value.clone().fill_(0)
    found = value.clone()
    values_of(found).view(torch.uint8).zero_()
    return found


@pytest.fixture(scope="module")
def peers():
    writer = PeerWriter(timedelta(seconds=20), interface="127.0.0.1")
    yield writer
    writer.shutdown()


@pytest.fixture(params=["files", "peers"])
def door(request, tmp_path, peers):
    """Returns a writer, and what makes a reader of what it has saved."""
    if request.param == "files":
        return FileWriter(tmp_path / "c"), lambda: FileReader(tmp_path / "c", safe_globals=QUANTISING)
    return peers, lambda: PeerReader(peers.metadata(), safe_globals=QUANTISING)


class Planner(dcp.DefaultSavePlanner):
    """Plans by dtype and shape alone, as for Megatron; torch's planner refuses some kinds itself."""

    def create_local_plan(self):
        self.plan = dcp.SavePlan([planned(key, value) for key, value in self.state_dict.items()])
        return self.plan

    def create_global_plan(self, all_plans):
        return create_default_global_save_plan(all_plans)


def planned(key, value):
    size, start = value.shape, torch.Size([0] * value.dim())
    chunk = dcp.metadata.ChunkStorageMetadata(start, size)
    about = TensorWriteData(chunk, TensorProperties(dtype=value.dtype), size)
    return WriteItem(dcp.metadata.MetadataIndex(key, start), WriteItemType.TENSOR, tensor_data=about)


@pytest.mark.parametrize(
    "kind", mostly_at_night(sorted(KINDS, key=BY_DAY.__contains__, reverse=True), by_day=len(BY_DAY))
)
def test_a_tensor_is_loaded_as_it_was_or_its_save_is_refused(kind, door):
    writer, reader = door
    value = KINDS[kind]()
    state = {"a": torch.ones(4), "m": value, "z": torch.ones(4)}

    def save():
        with own_errors():
            dcp.save(state, storage_writer=writer, planner=Planner(flatten_state_dict=False), no_dist=True)

    if kind in REFUSED | UNPLANNED:
        with pytest.raises((UnsupportedLeaf, dcp.CheckpointException)) as caught:
            save()
        assert kind in UNPLANNED or str(caught.value).startswith("m cannot be saved")
        return
    save()
    live = {"a": torch.zeros(4), "m": blank(value), "z": torch.zeros(4)}
    assert content(live["m"]) != content(value)
    dcp.load(live, storage_reader=reader(), no_dist=True)
    assert content(live["m"]) == content(value)
    assert torch.equal(live["z"], torch.ones(4))


#: What is saved, and the target that torch cannot copy it into.
UNFIT = {
    "quantised to float32": (lambda: quantised(torch.qint8), lambda: torch.zeros(4)),
    "dense to quint4x2": (lambda: torch.ones(4), lambda: quantised(torch.quint4x2)),
    "dense to sparse": (lambda: torch.ones(3), lambda: sparse(torch.ones(2))),
    "freed": (lambda: torch.ones(4), freed),
}
if copies(torch.float4_e2m1fn_x2):
    UNFIT["float4_e2m1fn_x2 to float32"] = (lambda: of_dtype(torch.float4_e2m1fn_x2), lambda: torch.zeros(4))


@pytest.mark.parametrize("unfit", UNFIT)
def test_a_target_that_cannot_take_the_values_is_refused_before_anything_is_written(unfit, door):
    writer, reader = door
    value, target = (make() for make in UNFIT[unfit])
    state = {"a": torch.ones(4), "m": value, "z": torch.ones(4)}
    dcp.save(state, storage_writer=writer, no_dist=True)
    live = {"a": torch.zeros(4), "m": target, "z": torch.zeros(4)}
    with (
        pytest.raises(StateMismatch, match="nothing was overwritten: m: the target cannot be written to"),
        own_errors(),
    ):
        dcp.load(live, storage_reader=reader(), no_dist=True)
    assert not live["a"].any()
    assert not live["z"].any()


def parts(kind):
    """Returns a tensor that each of two ranks holds a part of, or the whole."""
    mesh = init_device_mesh("cpu", (2,))
    placement = {"rows": Shard(0), "partial": Partial(), "whole": Replicate()}[kind]
    return DTensor.from_local(torch.ones(2), mesh, [placement], run_check=False)


def save_one_object(kept, folder, kind, where):
    """Saves a tuple with a tensor; returns the error."""
    del kept
    key = f"rank{torch.distributed.get_rank()}" if where == "own" else "t"
    state, alone = {"x": torch.ones(1), key: (parts(kind), 1)}, {"use_collectives": False} if where == "alone" else {}
    try:
        with own_errors():
            dcp.save(state, storage_writer=FileWriter(folder / f"{kind}-{where}"), **alone)
    except (UnsupportedLeaf, RankFailed) as e:
        return str(e)
    return ""


@pytest.mark.process
def test_an_object_that_one_rank_saves_holds_no_part_of_a_tensor(tmp_path):
    with Job(2) as job:
        for kind in ("rows", "partial"):
            for error in job.run(save_one_object, tmp_path, kind, "shared"):
                assert error.startswith("t cannot be saved: one rank saves this object for all ranks"), kind
        # Those that every rank saves itself, and those that are the same on all ranks.
        well = [("whole", "shared"), ("rows", "own")]
        if "use_collectives" in inspect.signature(dcp.save).parameters:
            for error in job.run(save_one_object, tmp_path, "rows", "alone"):
                assert "t cannot be saved: one rank saves this object for all ranks" in error
        for how in well:
            assert job.run(save_one_object, tmp_path, *how) == ["", ""], how
    assert not (tmp_path / "rows-shared" / "index.safetensors").exists()
