"""A rank that trains with Lightning: ``train FOLDER`` until killed, or ``resume FOLDER``.

With ``ModelParallelStrategy``, or ``FSDPStrategy`` where ``STRATEGY`` in the environment is ``fsdp``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch
from digests import digest
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import tensorferry


class OnCpu(FSDPStrategy):
    """A strategy that Fabric does not know: it refuses its own one on the CPU."""


def strategy():
    if os.environ.get("STRATEGY") == "fsdp":
        return OnCpu(state_dict_type="sharded")
    return ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)


def shard(model, mesh):
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return model


class Training:
    def __init__(self, fabric):
        self.fabric = fabric
        torch.manual_seed(fabric.global_rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Linear(9, 3))
        if os.environ.get("STRATEGY") == "fsdp":
            # Left to Lightning, it would look for an accelerator.
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        self.model = fabric.setup_module(model)
        self.optimizer = fabric.setup_optimizers(torch.optim.AdamW(self.model.parameters(), lr=0.1))
        self.step = 0

    def train(self):
        self.optimizer.zero_grad()
        self.step += 1
        self.fabric.backward(self.model(torch.full((2, 8), self.step + self.fabric.global_rank / 2)).square().sum())
        self.optimizer.step()

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}

    def load(self, path):
        state = self.state()
        self.fabric.load(path, state)
        self.step = state["step"]
        return self.digest()

    def digest(self):
        if os.environ.get("STRATEGY") == "fsdp":
            # This rank's part of the flat parameters, and of the optimizer's state beside them.
            return digest([*self.model.parameters(), self.optimizer.optimizer.state_dict(), self.step])
        return digest([*get_state_dict(self.model.module, self.optimizer.optimizer), self.step])


def main():
    what, folder = sys.argv[1], Path(sys.argv[2])
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy())
    fabric.launch()
    training = Training(fabric)
    for _ in range(2):
        training.train()
    if what == "train":
        for name in ("theirs", "ours"):
            with tensorferry.install() if name == "ours" else contextlib.nullcontext():
                fabric.save(folder / name, training.state())
        print("\nsaved", training.digest(), flush=True)
        while True:
            training.train()
    theirs = training.load(folder / "theirs")
    training.train()
    after = training.digest()
    training = Training(fabric)
    training.train()
    with tensorferry.install():
        ours = training.load(folder / "ours")
        # Steps that torch's writer has saved load, too.
        assert Training(fabric).load(folder / "theirs") == theirs
        whole = [digest(_load_distributed_checkpoint(folder / name)) for name in ("ours", "theirs")]
    training.train()
    assert whole[0] == whole[1]
    assert training.digest() == after
    print("\ntheirs", theirs, flush=True)
    print("\nours", ours, flush=True)


main()
