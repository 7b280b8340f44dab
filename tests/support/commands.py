"""The command `tensorferry` under test: a state, its forms at rest, and the command as a process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
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


def written(state: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Writes a state in each form, and returns where."""
    for write, name in FORMS.values():
        write(state, folder / name)
    checkpoint = folder / FORMS["checkpoint"][1]
    shutil.copy(next(checkpoint.glob("rank*")), folder / "state.safetensors")
    found = {form: folder / name for form, (_, name) in FORMS.items()}
    return {**found, "file": folder / "state.safetensors", "plain": plain_file(folder / "plain.safetensors")}


def plain_file(path: Path) -> Path:
    """A safetensors file of another program: two tensors, no checksums."""
    header = {"b": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    header["a.x"] = {"dtype": "I64", "shape": [1], "data_offsets": [16, 24]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<4fq", 1, 2, 3, 4, 7))
    return path


#: What :func:`plain_file` has.
PLAIN = {"b": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a.x": torch.tensor([7])}


def copied(form: Path, folder: Path) -> Path:
    """A copy that a test may change."""
    copy = folder / form.name
    shutil.copytree(form, copy) if form.is_dir() else shutil.copy(form, copy)
    return copy


def same_values(a: Any, b: Any) -> None:
    """Compares what formats of torch keep: values, types and dtypes, not what shares memory."""
    assert a.keys() == b.keys()
    for key, value in b.items():
        if isinstance(value, dict):
            same_values(a[key], value)
        elif isinstance(value, torch.Tensor):
            assert a[key].dtype == value.dtype
            assert torch.equal(a[key], value), key
        elif isinstance(value, list):
            same_values(dict(enumerate(a[key])), dict(enumerate(value)))
        else:
            assert a[key] == value, key
