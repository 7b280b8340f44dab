"""Megatron's own GPT model, trained by a job that then changes its parallel layout: live, and from files.

A job of two ranks, tensor parallel, trains a small GPT with Adam for a few steps, publishes its state from memory and
saves it into files, and trains on. A job of four ranks, tensor and data parallel, takes the state from the running
job, without a file; another one, of two ranks, data parallel, takes it from the files. Both train on, and their losses
must be those of the first job.

Run with megatron-core importable, on CPUs alone: `make demo-megatron`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "reshard"))
import ranks
import torch
import torch.distributed as dist

BEFORE, AFTER = 4, 4
VOCABULARY, LENGTH, BATCH = 96, 32, 8
#: How far losses of different layouts may differ: their sums are added up in another order.
TOLERANCE = 2e-4


def run_on_cpus() -> None:
    """Let Megatron run without a GPU: it asks for the current one and for its random numbers."""
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()


class Trainer:
    """One rank: its part of the model, and an optimizer for it.

    Args:
        rank: the number of this rank
        world: how many there are
    """

    def __init__(self, rank: int, world: int) -> None:
        """Does nothing yet: the layout comes with the first call."""
        del rank
        self._world = world

    def build(self, tensor_parallel: int, seed: int) -> None:
        """Make the model, for this many tensor parallel ranks; all others are data parallel."""
        import torch.optim
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        run_on_cpus()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            tensor_model_parallel_size=tensor_parallel,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
        )
        self._model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-3)
        self._group = parallel_state.get_data_parallel_group()
        self._step = 0

    def train(self, steps: int) -> list[float]:
        """Train on; return the loss of each step, over the batches of all data parallel ranks."""
        share = BATCH // dist.get_world_size(self._group)
        first = share * dist.get_rank(self._group)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        positions = torch.arange(LENGTH).expand(share, LENGTH)
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 + self._step)
            text = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator) + torch.arange(LENGTH + 1)
            mine = (text % VOCABULARY)[first : first + share]
            loss = self._model(mine[:, :-1], positions, mask, labels=mine[:, 1:]).mean()
            self._optimizer.zero_grad()
            loss.backward()
            total = loss.detach().clone()
            for tensor in (total, *(p.grad for p in self._model.parameters() if p.grad is not None)):
                dist.all_reduce(tensor, group=self._group)
                tensor /= dist.get_world_size(self._group)
            self._optimizer.step()
            self._step += 1
            losses.append(total.item())
        return losses

    def state(self) -> dict[str, Any]:
        """Return everything as Megatron shards it: the model, the optimizer's tensors like their parameters."""
        from megatron.core.dist_checkpointing.optimizer import (
            get_param_id_to_sharded_param_map,
            optim_state_to_sharding_state,
        )

        model = self._model.sharded_state_dict()
        # An optimizer that has made no step has no tensors yet, and nothing to load into.
        for parameter in self._model.parameters():
            if parameter not in self._optimizer.state:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self._optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
        # The states of a torch optimizer share their tensors with it.
        optimizer = self._optimizer.state_dict()
        known = get_param_id_to_sharded_param_map(model, self._model.parameters())
        counts = [float(one["step"]) for one in optimizer["state"].values()]
        optim_state_to_sharding_state(optimizer, known, exclude_keys=("step",))
        return {"model": model, "optimizer": optimizer, "step": self._step, "counts": counts}

    def publish(self) -> str:
        """Serve the state from memory; return how to get it."""
        from tensorferry import megatron
        from tensorferry.dcp import PeerWriter

        # A copy: this job trains on while others load.
        self._peers = PeerWriter(snapshot="copy", interface="127.0.0.1")
        return megatron.publish(self.state(), self._peers)

    def save(self, folder: str) -> None:
        """Save the state into files."""
        from tensorferry import megatron

        megatron.save(self.state(), folder)

    def load(self, folder: str, peers: str | None) -> float:
        """Load the state from files, or from a running job; return how many seconds it took."""
        from tensorferry import megatron

        began = time.monotonic()
        found = megatron.load(self.state(), folder, megatron.load_strategy(peers=peers))
        took = time.monotonic() - began
        self._model.load_state_dict(found["model"])
        self._step = found["step"]
        for parameter, count in zip(self._model.parameters(), found["counts"], strict=True):
            # Its other tensors were loaded where they are.
            self._optimizer.state[parameter]["step"] = torch.tensor(count)
        return took

    def end(self) -> None:
        """Stops serving."""
        peers = getattr(self, "_peers", None)
        if peers is not None:
            peers.shutdown()


def told(losses: list[float]) -> str:
    """Return losses as text."""
    return " ".join(f"{loss:.5f}" for loss in losses)


def same(wanted: list[float], found: list[float]) -> bool:
    """Whether these are the losses of one training, but for the order of sums."""
    return max(abs(a - b) for a, b in zip(wanted, found, strict=True)) < TOLERANCE


def main() -> int:
    """Run the three jobs and compare them; return an exit status."""
    logging.basicConfig(level=logging.INFO)
    ranks._PRELOAD.append("megatron.core.models.gpt")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        source = stack.enter_context(ranks.Job("the first job", 2, Trainer))
        source("build", 2, 1)
        print(f"2 ranks, tensor parallel 2:                       {told(source('train', BEFORE)[0])}")
        metadata = source("publish")[0]
        source("save", folder)
        wanted = source("train", AFTER)[0]
        print(f"  ... trains on:                                  {told(wanted)}")
        right = True
        for name, world, tensor_parallel, peers in (
            ("4 ranks, tensor 2 x data 2, from the running job", 4, 2, metadata),
            ("2 ranks, data parallel 2, from the files", 2, 1, None),
        ):
            job = stack.enter_context(ranks.Job(name, world, Trainer))
            job("build", tensor_parallel, 2)
            took = max(job("load", folder, peers))
            found = job("train", AFTER)[0]
            print(f"{name + ':':<50}{told(found)}   (loaded in {1e3 * took:.0f} ms)")
            right = right and same(wanted, found)
        print("the losses are the same" if right else "THE LOSSES DIFFER")
        return 0 if right else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
