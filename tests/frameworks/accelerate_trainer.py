"""A rank that saves FSDP2's state with accelerate: ``train FOLDER`` until it is killed, or ``resume FOLDER``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, merge_fsdp_weights
from framework_ranks import digest
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import tensorferry


def on_cpu():
    """Returns an ``Accelerator`` with FSDP2 on the CPU: accelerate itself takes its plugin on accelerators only."""
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    return accelerator


class Training:
    def __init__(self, accelerator):
        self.rank = accelerator.process_index
        accelerator.free_memory()
        torch.manual_seed(self.rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Linear(9, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.accelerator = accelerator

    def train(self, number):
        self.optimizer.zero_grad()
        self.accelerator.backward(self.model(torch.full((2, 8), number + self.rank / 2)).square().sum())
        self.optimizer.step()

    def save(self, path):
        self.accelerator.save_state(path)

    def load(self, path):
        self.accelerator.load_state(path)
        return self.digest()

    def digest(self):
        return digest(get_state_dict(self.model, self.optimizer.optimizer))


def main():
    what, folder = sys.argv[1], Path(sys.argv[2])
    accelerator = on_cpu()
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
