"""One rank of a job: it trains a sharded model, publishes its state to other jobs, or loads theirs."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tensorferry.dcp import PeerReader, PeerWriter

TIMEOUT = timedelta(seconds=60)
WIDTH = 257  # no number of ranks divides it evenly


class Rank:
    """A rank's state: a model sharded by FSDP2 over all ranks of its job, and AdamW with a schedule."""

    def __init__(self, rank: int, world: int, seed: int) -> None:
        self.rank = rank
        mesh = init_device_mesh("cpu", (world,))
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(32, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4)
        )
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.step = 0
        self.writer: PeerWriter | None = None

    def train(self, steps: int) -> float:
        """Train; every rank sees the whole batch, so that the number of ranks makes no difference to the result."""
        loss = torch.tensor(0.0)
        for _ in range(steps):
            self.step += 1
            generator = torch.Generator().manual_seed(self.step)
            x = torch.randn(64, 32, generator=generator)
            loss = nn.functional.mse_loss(self.model(x), x[:, :4].sin())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        """Return weights, optimizer and step in the form that torch's checkpoints expect."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def publish(self) -> str:
        """Publish the state without a copy; return the metadata that a reader needs."""
        self.writer = PeerWriter(TIMEOUT, interface="127.0.0.1")
        dcp.save(self.state(), storage_writer=self.writer)
        return self.writer.metadata()

    def withdraw(self) -> None:
        """End the publication, so that the state may change again."""
        assert self.writer is not None
        self.writer.withdraw()

    def load(self, metadata: str) -> dict[str, int]:
        """Load what another job has published; return how many bytes that took."""
        state = self.state()
        reader = PeerReader(metadata, timeout=TIMEOUT)
        dcp.load(state, storage_reader=reader)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]
        return reader.report

    def digest(self) -> dict[str, str]:
        """Return the SHA-256 of every tensor, assembled from all ranks, and of everything else."""
        found: dict[str, str] = {}
        for path, value in torch.utils._pytree.tree_flatten_with_path(self.state())[0]:
            name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
            if isinstance(value, DTensor):
                value = value.full_tensor()
            raw = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if torch.is_tensor(value) else b""
            what = f"{value.dtype} {list(value.shape)}" if torch.is_tensor(value) else repr(value)
            found[name] = hashlib.sha256(what.encode() + raw).hexdigest()
        return found

    def end(self) -> None:
        """Shut the publication down for good."""
        if self.writer is not None:
            self.writer.shutdown()
