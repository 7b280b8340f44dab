"""What lies on an accelerator (simulated), or is pickled, is uploaded a part at a time through one buffer."""

from __future__ import annotations

import pytest
import torch
from dcp_doors import load, save

from stand_in import stand_in
from tensorferry.memory import late

MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is")


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(late, "SLOT", 8 * MIB)
    with stand_in() as device:
        monkeypatch.setattr("tensorferry.dcp.file_writer.ACCELERATOR", device)
        yield device


def state(device, seed):
    found = {f"w{i}": torch.full((5 * MIB // 4,), seed + i) for i in range(5)}
    device.adopt(*found.values())
    return {**found, "sparse": torch.full((3 * MIB // 4,), seed).to_sparse(), "host": torch.full((2 * MIB,), seed)}


def test_all_of_it_comes_back(server, device):
    for seed in (1.0, 2.0):
        saved = state(device, seed)
        save(saved, server.place)
        found = {name: torch.zeros(value.shape) for name, value in saved.items()}
        found = load(found | {"sparse": found["sparse"].to_sparse()}, server.place)
        for name, value in saved.items():
            assert torch.equal(found[name].to_dense(), value.to_dense()), name
    assert len(device.pinned_bytes) == 1
    assert device.pinned_bytes[0] < 9 * MIB
