"""What a save takes of memory besides the state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.dcp import FileReader, FileWriter

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is", "ignore:torch.quantize", "ignore:TypedStorage is", "ignore::FutureWarning"
)
COUNT, ELEMENTS = 4, 1 << 24


def sparse(value):
    indices = torch.arange(ELEMENTS // 3)[None]
    return torch.sparse_coo_tensor(
        indices, torch.full((ELEMENTS // 3,), value), (ELEMENTS,), is_coalesced=True, check_invariants=False
    )


def memory(name):
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) >> 10


def test_there_is_no_second_copy_of_tensors_that_are_pickled(tmp_path):
    state = {f"w{i}": sparse(float(i)) for i in range(COUNT)}
    nbytes = COUNT * ELEMENTS * 4 >> 20
    dcp.save({"w0": torch.ones(3).to_sparse()}, storage_writer=FileWriter(tmp_path), no_dist=True)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    dcp.save(state, storage_writer=FileWriter(tmp_path), no_dist=True)
    # One buffer, and those of the threads that write.
    assert memory("VmHWM") - before < 64 + 64 < nbytes
    found = {"w1": sparse(0.0)}
    dcp.load(found, storage_reader=FileReader(tmp_path), no_dist=True)
    assert torch.equal(found["w1"].coalesce().values(), state["w1"].values())
    assert torch.equal(found["w1"].coalesce().indices(), state["w1"].indices())
