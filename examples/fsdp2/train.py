"""A training loop with FSDP2 whose checkpoints hold all that a run needs to go on: run it again, and it resumes.

    torchrun --nproc-per-node 2 examples/fsdp2/train.py --folder /tmp/run --steps 20

The folder is one that all ranks see. A resume with the same number of ranks is equal bit by bit; with another number
the sums over ranks are formed in another order, and each rank has other random numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tensorferry.checkpointing import AsyncCheckpointer
from tensorferry.errors import TensorferryError

WIDTH, BATCH = 64, 12
CUDA = torch.cuda.is_available()


class Job:
    """Everything that changes while it trains."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, 8)).to("cuda" if CUDA else "cpu")
        for layer in layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.step = 0
        torch.manual_seed(1 + dist.get_rank())  # each rank drops other values

    def state(self) -> dict[str, Any]:
        """Returns the state of this rank: DTensors are its parts, and everything else is its own."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        random = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if CUDA else {})
        of_scheduler = self.scheduler.state_dict()
        return {"model": model, "optimizer": optimizer, "scheduler": of_scheduler, "random": random, "step": self.step}

    def load(self, checkpointer: AsyncCheckpointer, path: str) -> None:
        """Goes on from a checkpoint."""
        state = self.state()  # get_state_dict makes the optimizer's state, which a new one lacks
        checkpointer.load(path, state, strict=True)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"]["cpu"])
        if CUDA:
            torch.cuda.set_rng_state(state["random"]["cuda"])
        self.step = state["step"]

    def train(self) -> None:
        """Makes one step. Which data it gets depends on its number alone, so a data loader has nothing to save."""
        rank, each = dist.get_rank(), BATCH // dist.get_world_size()
        rows = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(self.step))
        mine = rows[rank * each : (rank + 1) * each].to(next(self.model.parameters()).device)
        self.optimizer.zero_grad()
        self.model(mine).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1

    def digest(self) -> str:
        """Returns SHA-256 of what this rank has of the model."""
        parts = [parameter.to_local().detach().cpu().numpy().tobytes() for parameter in self.model.parameters()]
        return hashlib.sha256(b"".join(parts)).hexdigest()


def report(written: Future[None]) -> None:
    """Logs the error of a save. Who does not read it gets it from the next save, which then is not made."""
    if (error := written.exception()) is not None:
        logging.error("a checkpoint is not written, training goes on: %s", error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="for checkpoints; all ranks see it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps from one save to the next")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    if CUDA:
        torch.cuda.set_device(dist.get_node_local_rank())
    job = Job()
    checkpointer = AsyncCheckpointer(keep_last=3)
    newest = checkpointer.latest(options.folder)  # the same on all ranks
    if newest is not None:
        job.load(checkpointer, newest)
        logging.info("rank %d goes on after step %d, from %s", dist.get_rank(), job.step, newest)
    while job.step < options.steps:
        job.train()
        if job.step % options.every == 0:
            try:
                staged, written = checkpointer.save(f"{options.folder}/step-{job.step}", job.state(), step=job.step)
                written.add_done_callback(report)
                staged.result()  # the state may change now; another process writes
            except TensorferryError:
                logging.exception("step %d is not saved, training goes on", job.step)
    checkpointer.close()  # waits for the last save
    logging.info("rank %d at step %d: %s", dist.get_rank(), job.step, job.digest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
