"""Trains with Lightning's Trainer on one device or with DDP, and saves and resumes through a CheckpointIO.

    pip install tensorferry lightning
    python lightning_checkpoint_io.py 2    # trains two epochs, and saves after each
    python lightning_checkpoint_io.py 4    # goes on from the newest checkpoint

Each checkpoint is a folder, which one rank has written; ``tensorferry inspect`` shows what is in it.
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import CheckpointIO

from tensorferry.checkpointing import SyncCheckpointer

CHECKPOINTS = Path("checkpoints-of-the-plugin")


class FolderCheckpointIO(CheckpointIO):
    """Saves what Lightning gives to rank 0, and loads it on every rank."""

    def __init__(self) -> None:
        # Lightning calls save_checkpoint on rank 0 alone, so there is no other rank to agree with.
        self.checkpointer = SyncCheckpointer(rank=0, world_size=1)

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        """Writes a checkpoint into the folder ``path``, which is committed when all of it is on the disk."""
        if storage_options is not None:
            raise TypeError("storage_options are for file systems behind fsspec, and this writes to a folder")
        self.checkpointer.save(path, checkpoint)

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        """Returns a checkpoint, whose pickles are always read with the allow-list, as with ``weights_only=True``."""
        del weights_only
        return self.checkpointer.load(path, default_map_location=map_location)

    def remove_checkpoint(self, path):
        """Removes a checkpoint that Lightning does not keep."""
        shutil.rmtree(path, ignore_errors=True)

    def teardown(self):
        """Ends what the checkpointer has started."""
        self.checkpointer.close()


class Autoencoder(LightningModule):
    """A model that prints its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))

    def configure_optimizers(self):
        """Returns the optimizer of all parameters, and a schedule."""
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def training_step(self, batch, _index):
        """Returns the loss of a batch, and prints it on rank 0."""
        loss = torch.nn.functional.mse_loss(self.model(batch), batch)
        self.print(f"step {self.global_step} loss {loss.item()!r}")
        return loss


def main() -> None:
    logging.basicConfig(level=logging.INFO)  # shows what tensorferry has to say
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=16)
    trainer = Trainer(
        accelerator="auto",
        devices=1,  # with more: strategy="ddp"
        max_epochs=int(sys.argv[1]),
        plugins=[FolderCheckpointIO()],
        callbacks=[ModelCheckpoint(CHECKPOINTS, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
    )
    saved = sorted(CHECKPOINTS.glob("epoch=*"), key=lambda path: int(path.stem.partition("=")[2]))
    trainer.fit(Autoencoder(), data, ckpt_path=saved[-1] if saved else None)


if __name__ == "__main__":
    main()
