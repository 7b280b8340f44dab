"""The command `tensorferry` under test: a state, its forms at rest, and the command as a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpointing import SyncCheckpointer
from tensorferry.dcp import FileWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TIMEOUT = timedelta(seconds=30)


def make_state() -> dict[str, Any]:
    """A state with all kinds of leaves: plain tensors, tied ones, a view, numbers, an object."""
    torch.manual_seed(0)
    weight = torch.randn(300, 200)
    return {
        "model": {"weight": torch.nn.Parameter(weight), "bias": torch.randn(200), "tied": weight},
        "half": torch.randn(70, 3).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "view": torch.arange(20)[3:9],
        "list": [torch.ones(5, dtype=torch.int8), 3],
        "step": 12,
        "name": "run",
    }


@dataclass
class Run:
    """What a run of the command printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@contextlib.contextmanager
def command(*arguments: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The command as a process of its own, which is ended at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorferry", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **options.pop("env", {})},
        **options,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


@contextlib.contextmanager
def serving(path: Path, *arguments: object) -> Iterator[list[str]]:
    """The metadata of a checkpoint that ``tensorferry serve`` serves; it must end cleanly."""
    with command("serve", path, "--interface", "127.0.0.1", "--json", *arguments) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=30)[1]
        yield json.loads(line)["metadata"]
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")


def damage(path: Path, offset: int) -> None:
    """Flips a bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Waits for a condition while a process runs."""
    end = time.monotonic() + 110
    while not condition():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def incomplete(path: Path) -> list[Path]:
    """What pulls and conversions into ``path`` have begun, or have left."""
    return sorted(path.parent.glob(f".{path.name}.*.partial"))


def write_archive(state: Any, path: Path) -> None:
    torch.save(state, path)


def write_checkpoint(state: Any, path: Path, step: int | None = None) -> None:
    saving = SyncCheckpointer()
    saving.save(path, state, step=step)
    saving.close()


def write_distributed(state: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=FileWriter(path))


def write_torch_distributed(state: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path)


#: By name, what writes a state, and the name of the file or folder.
FORMS = {
    "archive": (write_archive, "state.pt"),
    "checkpoint": (write_checkpoint, "checkpoint"),
    "distributed": (write_distributed, "distributed"),
    "torch": (write_torch_distributed, "torch"),
}
