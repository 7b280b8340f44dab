"""Trains with Lightning's Trainer and ModelParallelStrategy (FSDP2), and saves and resumes with tensorferry's files.

    pip install tensorferry lightning
    python lightning_fsdp2.py 2    # trains two epochs on two ranks, and saves after each
    python lightning_fsdp2.py 4    # goes on from the newest checkpoint

Lightning starts the second rank itself, by running the script again.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import tensorferry

CHECKPOINTS = Path("checkpoints-of-fsdp2")


class Autoencoder(LightningModule):
    """A model that Lightning shards over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))

    def configure_model(self) -> None:
        """Shards each layer, and the whole."""
        for layer in (*self.model, self.model):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        """Returns the optimizer of all parameters."""
        return torch.optim.AdamW(self.parameters())

    def training_step(self, batch, _index):
        """Returns the loss of a batch, and prints it on rank 0."""
        loss = torch.nn.functional.mse_loss(self.model(batch), batch)
        self.print(f"step {self.global_step} loss {loss.item()!r}")
        return loss


def main() -> None:
    logging.basicConfig(level=logging.INFO)  # shows what install() has replaced
    tensorferry.install()  # Lightning's shards are now written with FileWriter and read with FileReader

    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=8)
    trainer = Trainer(
        accelerator="auto",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=int(sys.argv[1]),
        callbacks=[ModelCheckpoint(CHECKPOINTS, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
    )
    saved = sorted(CHECKPOINTS.glob("epoch=*"), key=lambda path: int(path.stem.partition("=")[2]))
    trainer.fit(Autoencoder(), data, ckpt_path=saved[-1] if saved else None)


if __name__ == "__main__":
    main()
