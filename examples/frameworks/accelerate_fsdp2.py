"""Trains with accelerate and FSDP2, and saves and resumes with tensorferry's files.

    pip install tensorferry accelerate
    torchrun --nproc-per-node 2 accelerate_fsdp2.py 8     # trains 8 steps on two GPUs, and saves every fourth
    torchrun --nproc-per-node 2 accelerate_fsdp2.py 16    # goes on from the newest checkpoint

accelerate shards on accelerators. On the CPU it ignores ``fsdp_plugin``, and there is nothing for tensorferry to do.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin

import tensorferry

CHECKPOINTS = Path("checkpoints")


def main() -> None:
    logging.basicConfig(level=logging.INFO)  # shows what install() has replaced
    tensorferry.install()  # accelerate's shards are now written with FileWriter and read with FileReader

    steps = int(sys.argv[1])
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="size_based_wrap",
        min_num_params=1000,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    saved = sorted(CHECKPOINTS.glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
    if saved:
        accelerator.load_state(saved[-1])
    first = int(saved[-1].name.partition("-")[2]) if saved else 0
    for step in range(first, steps):
        generator = torch.Generator().manual_seed(step * accelerator.num_processes + accelerator.process_index)
        batch = torch.randn(16, 32, generator=generator).to(accelerator.device)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch), batch)
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print(f"step {step} loss {loss.item()!r}")
        if (step + 1) % 4 == 0:
            accelerator.save_state(CHECKPOINTS / f"step-{step + 1}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
