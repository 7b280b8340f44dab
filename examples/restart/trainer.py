"""One trainer of the restart demo: trains, saves every few steps, and begins where the newest checkpoint ends.

Every event is a line of JSON on stdout.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402  the imports are part of what is timed
import hashlib  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from tensorferry.checkpointing import AsyncCheckpointer  # noqa: E402


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def digest(value: Any) -> str:
    """Returns a SHA-256 over all tensors and numbers of a state."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {list(value.shape)}".encode())
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(f"{key}:".encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                add(one)
        else:
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()


class Job:
    """A model, its optimizer and its scheduler; the data of a step depend on its number alone."""

    def __init__(self, width: int, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width)) for _ in range(6)]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)
        self.step = 0
        self._width = width

    def train(self) -> float:
        """Makes one step; returns its loss."""
        generator = torch.Generator().manual_seed(self.step)
        inputs = torch.randn(16, self._width, generator=generator)
        wanted = torch.randint(0, 64, (16,), generator=generator)
        loss = torch.nn.functional.cross_entropy(self.model(inputs), wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return loss.item()

    def state_dict(self) -> dict[str, Any]:
        """Returns all that the job needs to go on from here."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to where `state` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="save below it, and begin with the newest checkpoint there")
    parser.add_argument("--every", type=int, default=5, help="steps from one save to the next")
    parser.add_argument("--keeper", help="the name of the keeper")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # shows from where it loads
    torch.set_num_threads(1)
    tell("imported", seconds=time.perf_counter() - STARTED)
    job = Job(options.width, options.seed)
    checkpointer = None
    if options.folder is not None:
        checkpointer = AsyncCheckpointer(keeper=options.keeper, keep_last=3)
        newest = checkpointer.latest(options.folder)
        if newest is not None:
            began = time.perf_counter()
            state = checkpointer.load(newest)
            took = time.perf_counter() - began
            job.load_state_dict(state)
            tell("loaded", seconds=took, step=job.step, path=str(newest), digest=digest(job.state_dict()))
    while job.step < options.steps:
        loss = job.train()
        tell("step", step=job.step, loss=loss)
        if checkpointer is not None and job.step % options.every == 0:
            began = time.perf_counter()
            staged, _ = checkpointer.save(str(options.folder / f"step-{job.step}"), job.state_dict(), step=job.step)
            staged.result()
            stood_still = time.perf_counter() - began
            tell("staged", step=job.step, seconds=stood_still, digest=digest(job.state_dict()))
    if checkpointer is not None:
        checkpointer.close()
    tell("done", digest=digest(job.state_dict()))


if __name__ == "__main__":
    main()
