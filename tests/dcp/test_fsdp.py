"""FSDP2: a checkpoint of two ranks is loaded by one rank, and by two that shard along another dimension."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import Job
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from nights import mostly_at_night
from states import TIMEOUT
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter

pytestmark = pytest.mark.process


class Training:
    """A model none of whose dimensions can be divided evenly by the ranks, except the one it may be sharded along."""

    def __init__(self, seed, columns):
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = nn.Sequential(nn.Linear(32, 65), nn.GELU(), nn.Linear(65, 129), nn.LayerNorm(129))
        chosen = _columns if columns else None
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, shard_placement_fn=chosen)
        fully_shard(self.model, mesh=mesh, shard_placement_fn=chosen)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 * seed)
        for step in range(3):
            self.optimizer.zero_grad()
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed * 10 + step))
            self.model(x).square().sum().backward()
            self.optimizer.step()

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def take(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def digests(self):
        """Returns a digest of every value, assembled from all ranks."""
        found = {}
        for path, value in torch.utils._pytree.tree_flatten_with_path(self.state())[0]:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            raw = whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if torch.is_tensor(whole) else b""
            what = f"{whole.dtype}{list(whole.shape)}" if torch.is_tensor(whole) else repr(whole)
            found[str(path)] = hashlib.sha256(what.encode() + raw).hexdigest()
        return found


def _columns(parameter):
    even = parameter.ndim == 2 and parameter.shape[1] % 2 == 0
    return Shard(1) if even else Shard(0)


def _train(kept, folder):
    kept["training"] = training = Training(seed=1, columns=False)
    dcp.save(training.state(), storage_writer=FileWriter(folder))
    kept["writer"] = writer = PeerWriter(TIMEOUT, interface="127.0.0.1")
    kept["state"] = training.state()
    dcp.save(kept["state"], storage_writer=writer)
    return training.digests(), writer.metadata()


def _end(kept):
    kept["writer"].shutdown()


def _load(kept, folder, metadata, columns):
    del kept
    results = []
    for reader in (FileReader(folder), PeerReader(metadata, timeout=TIMEOUT)):
        training = Training(seed=2, columns=columns)
        before = training.digests()
        placements = {p.placements for p in training.model.parameters()}
        state = training.state()
        dcp.load(state, storage_reader=reader)
        training.take(state)
        results.append((before, training.digests(), len(placements)))
    return results


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("world", "columns"), mostly_at_night([(1, False), (2, True)]))
def test_a_trained_state_is_loaded_in_another_sharding(world, columns, tmp_path):
    with Job(2) as source, Job(world) as target:
        published = source.run(_train, tmp_path / "ck")
        expected, metadata = published[0]
        assert all(entry == published[0] for entry in published)
        assert {name.count("exp_avg") for name in expected} == {0, 1}, "the moments of AdamW are part of it"
        for of_rank in target.run(_load, tmp_path / "ck", metadata, columns):
            for before, after, placements in of_rank:
                assert before.keys() == expected.keys()
                assert placements == (2 if columns else 1)
                assert sum(before[name] != expected[name] for name in expected) > 10
                assert after == expected
        source.run(_end)
