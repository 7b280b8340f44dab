"""A rank that saves FSDP2's state with accelerate: ``train FOLDER`` until it is killed, or ``resume FOLDER``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from framework_ranks import digest
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import tensorferry


class Training:
    def __init__(self, accelerator):
        self.rank = accelerator.process_index
        torch.manual_seed(self.rank)
        # accelerate itself shards on accelerators only; what it saves and loads is the same.
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Linear(9, 3))
        for layer in (*self.model, self.model):
            fully_shard(layer, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        self.accelerator = accelerator

    def train(self, number):
        self.optimizer.zero_grad()
        self.model(torch.full((2, 8), number + self.rank / 2)).square().sum().backward()
        self.optimizer.step()

    def save(self, path):
        save_fsdp_model(self.plugin, self.accelerator, self.model, path)
        save_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, path)

    def load(self, path):
        load_fsdp_model(self.plugin, self.accelerator, self.model, path)
        load_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, path)
        return self.digest()

    def digest(self):
        return digest(get_state_dict(self.model, self.optimizer))


def main():
    what, folder = sys.argv[1], Path(sys.argv[2])
    accelerator = Accelerator(cpu=True)
    training = Training(accelerator)
    training.train(1)
    training.train(2)
    if what == "train":
        for name in ("theirs", "ours"):
            with tensorferry.install() if name == "ours" else contextlib.nullcontext():
                training.save(folder / name)
        print("\nsaved", training.digest(), flush=True)
        while True:
            training.train(3)
    theirs = training.load(folder / "theirs")
    training.train(3)
    after = training.digest()
    training = Training(accelerator)
    training.train(7)
    with tensorferry.install():
        ours = training.load(folder / "ours")
        assert Training(accelerator).load(folder / "theirs") == theirs
        for name in ("ours", "theirs"):
            merge_fsdp_weights(str(folder / name / "pytorch_model_fsdp_0"), str(folder / f"merged_{name}"))
    training.train(3)
    assert training.digest() == after
    merged = [digest(load_file(folder / f"merged_{name}" / "model.safetensors")) for name in ("ours", "theirs")]
    assert merged[0] == merged[1]
    print("\ntheirs", theirs, flush=True)
    print("\nours", ours, flush=True)


main()
