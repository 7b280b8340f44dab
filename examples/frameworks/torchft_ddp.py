"""Trains a data-parallel replica with tensorferry's Manager: it heals in place, from every healthy replica.

    pip install 'tensorferry[torchft]'
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 2>lighthouse.log

In a second and a third terminal (torchft logs several lines for each step to standard error):

    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    REPLICA=0 torchrun --nproc-per-node 1 --master-port 29500 torchft_ddp.py 2>replica0.log
    REPLICA=1 torchrun --nproc-per-node 1 --master-port 29501 torchft_ddp.py 2>replica1.log

Stop the second replica with Ctrl-C and start it again: it prints ``healed`` and goes on with the loss of the first.

``WIDTH=4096`` makes the state 1.6 GB large. ``TENSORFERRY_SECRET_FILE`` and ``TENSORFERRY_TLS=1`` protect it without a
change to the script.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torchft import Optimizer, ProcessGroupGloo

from tensorferry import Manager  # was: from torchft import Manager

TIMEOUT = timedelta(seconds=30)
REPLICA = int(os.environ["REPLICA"])
STEPS = int(os.environ.get("STEPS", "1000000"))
WIDTH = int(os.environ.get("WIDTH", "64"))


def prime(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives a new optimizer the tensors of its state, with the values from before its first step."""
    # torch makes them by a step without gradients and with a learning rate of 0: no weight changes.
    get_optimizer_state_dict(model, optimizer)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def main() -> None:
    logging.basicConfig(level=logging.INFO)  # shows the line of each heal, and what torchft does about it
    hidden = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(8 if WIDTH > 64 else 0)]
    model = torch.nn.Sequential(
        torch.nn.Linear(32, WIDTH), torch.nn.ReLU(), *hidden, torch.nn.ReLU(), torch.nn.Linear(WIDTH, 32)
    )
    inner = torch.optim.AdamW(model.parameters())
    prime(model, inner)  # or else the optimizer's tensors come into fresh memory

    def state_dict():
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        print("healed", flush=True)

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        state_dict=state_dict,
        load_state_dict=load_state_dict,
        replica_id=f"replica_{REPLICA}",
        timeout=TIMEOUT,
    )
    optimizer = Optimizer(manager, inner)
    batches = torch.Generator().manual_seed(REPLICA)
    test = torch.randn(64, 32, generator=torch.Generator().manual_seed(1234))

    while manager.current_step() < STEPS:
        batch = torch.randn(16, 32, generator=batches)
        optimizer.zero_grad()  # begins the quorum of this step
        torch.nn.functional.mse_loss(model(batch), batch).backward()
        # torchft's DistributedDataParallel does this as well, but in 0.2.0 it ends the survivors with an AssertionError
        # when a replica dies in the middle of an all-reduce over gloo.
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()  # if all replicas of the quorum agree
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model(test), test).item()
        print(f"step {manager.current_step()} loss {loss!r}", flush=True)
        time.sleep(0.1)  # so that the steps can be read
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
