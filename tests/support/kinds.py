"""Every kind of checkpoint that the command may be given, and what each verb has to make of it."""

from __future__ import annotations

import inspect
import json
import shutil
import zipfile
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from commands import write_archive, write_checkpoint, write_distributed, write_torch_distributed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMATS = ("tensorferry", "torch", "checkpoint", "dcp", "torch-dcp", "safetensors")
TENSORS = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.tensor([-0.0, float("nan")])}
STATE = {"model": TENSORS, "step": 3, "lr": -0.0}
_MEGATRON, _CONFIG = "megatron", '{"sharded_backend": "%s", "sharded_backend_version": 1}'


class Kind(NamedTuple):
    """A kind of checkpoint.

    Attributes:
        write: writes one to a path
        name: of the file or folder
        refused: the status with which every verb refuses it, and what it says; ``None`` if it is taken
        state: what it holds
        verify: the status of ``verify``
        digests: that of ``inspect --digests``
        convert: that of ``convert``
    """

    write: Callable[[Path], None]
    name: str
    refused: tuple[int, str] | None = None
    state: dict[str, Any] = STATE
    verify: int = 0
    digests: int = 0
    convert: int = 0

    @property
    def takes_notes(self) -> bool:
        """Whether it is a folder without a ``metadata.json``."""
        return "." not in self.name and _MEGATRON not in self.name


def _legacy(path: Path) -> None:
    torch.save(STATE, path, _use_new_zipfile_serialization=False)


def _script(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))


def _zip(path: Path, method: int = zipfile.ZIP_STORED, name: str = "w.npy") -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(name, bytes(1000))


def _compressed(path: Path) -> None:
    """What another tool has made of a file of ``torch.save``."""
    torch.save({"w": torch.zeros(4), "n": list(range(1000))}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data, zipfile.ZIP_DEFLATED if name.endswith("data.pkl") else zipfile.ZIP_STORED)


def _own_file(path: Path) -> None:
    write_checkpoint(STATE, path.with_suffix(""))
    next(path.with_suffix("").glob("rank*")).rename(path)
    shutil.rmtree(path.with_suffix(""))


def _foreign(path: Path) -> None:
    from safetensors.torch import save_file

    save_file(TENSORS, path)


def _hugging_face(path: Path, **options: Any) -> None:
    if unknown := options.keys() - inspect.signature(HuggingFaceStorageWriter).parameters.keys():
        pytest.skip(f"this torch's writer has no {', '.join(unknown)}")
    dcp.save(dict(TENSORS), storage_writer=HuggingFaceStorageWriter(str(path), **options), no_dist=True)


def _model(path: Path) -> None:
    _hugging_face(path, fqn_to_index_mapping={"w": 1, "b": 2})


def _parts(path: Path) -> None:
    _hugging_face(path, save_distributed=True)


def _part(path: Path) -> None:
    _parts(path.with_suffix(""))
    next(path.with_suffix("").iterdir()).rename(path)
    path.with_suffix("").rmdir()


def _consolidated(path: Path) -> None:
    _hugging_face(path, save_distributed=True, enable_consolidation=True)


def _halves(path: Path) -> None:
    """A rank's half of each tensor, beside an index that has it for the whole."""
    from safetensors.torch import save_file

    path.mkdir()
    info = json.dumps({"w": {"saved_offsets": [3, 0]}, "b": {"saved_offsets": [2]}})
    save_file(TENSORS, path / "model.safetensors", {"DCP_SHARDING_INFO": info})
    index = {"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _megatron(path: Path, backend: str, write: Callable[[Any, Path], None]) -> None:
    write(STATE, path)
    (path / "metadata.json").write_text(_CONFIG % backend)
    torch.save({"iteration": 3}, path / "common.pt")


def _zarr(path: Path) -> None:
    (path / "w").mkdir(parents=True)
    (path / "w/.zarray").write_text("{}")
    (path / "metadata.json").write_text(_CONFIG % "zarr")


def _arrays(path: Path) -> None:
    (path / "w").mkdir(parents=True)
    (path / "zarr.json").write_text("{}")
    (path / "w/zarr.json").write_text("{}")


def _rank_file(path: Path) -> None:
    path.mkdir()
    torch.save(STATE, path / "checkpoint_0.pt")


def _notes(path: Path) -> None:
    path.write_text("these are notes of a meeting")


def _nothing(path: Path) -> None:
    path.mkdir()
    _notes(path / "notes.txt")


_NOT_TORCHS = 4, "TorchScript"
_PARTS = 4, "HuggingFaceStorageReader"
KINDS = {
    "torch.save": Kind(lambda p: write_archive(STATE, p), "state.pt"),
    "legacy": Kind(_legacy, "legacy.pt", (4, "before release 1.6")),
    "TorchScript": Kind(_script, "script.pt", _NOT_TORCHS),
    "npz": Kind(_zip, "npz.pt", _NOT_TORCHS),
    "compressed zip": Kind(lambda p: _zip(p, zipfile.ZIP_DEFLATED, "p.jpg"), "zip.pt", _NOT_TORCHS),
    "compressed torch.save": Kind(_compressed, "packed.pt", (4, "compressed")),
    "text": Kind(_notes, "text.pt", (4, "it is text")),
    "empty": Kind(lambda p: p.touch(), "empty.safetensors", (4, "it is empty")),
    "container": Kind(_own_file, "state.safetensors"),
    "safetensors": Kind(_foreign, "foreign.safetensors", None, TENSORS, verify=1),
    "model": Kind(_model, "model", None, TENSORS, verify=1),
    "consolidated": Kind(_consolidated, "consolidated", None, TENSORS, verify=1),
    "parts": Kind(_parts, "parts", _PARTS),
    "halves": Kind(_halves, "halves", _PARTS),
    "a part": Kind(_part, "part.safetensors", _PARTS),
    "torch's": Kind(lambda p: write_torch_distributed(STATE, p), "torchs", verify=1, digests=2),
    "FileWriter's": Kind(lambda p: write_distributed(STATE, p), "writers"),
    "checkpointer's": Kind(lambda p: write_checkpoint(STATE, p, 5), "checkpointers"),
    "Megatron's": Kind(lambda p: _megatron(p, "tensorferry", write_distributed), "megatron", convert=2),
    "torch_dist": Kind(
        lambda p: _megatron(p, "torch_dist", write_torch_distributed), "megatron-dist", verify=1, digests=2, convert=2
    ),
    "zarr of Megatron": Kind(_zarr, "megatron-zarr", (2, ""), verify=1),
    "zarr": Kind(_arrays, "arrays", (3, "holds no checkpoint")),
    "CheckpointWriter's": Kind(_rank_file, "ranks", (2, "name the file of a rank")),
    "a folder": Kind(_nothing, "nothing", (3, "holds no checkpoint")),
}


def written(kind: Kind, folder: Path, *, with_notes: bool) -> Path:
    """Writes a checkpoint; ``with_notes`` adds a ``metadata.json`` of the user's to a folder that has none."""
    folder.mkdir(exist_ok=True)
    path = folder / kind.name
    kind.write(path)
    if with_notes and kind.takes_notes:
        (path / "metadata.json").write_text('{"author": "me", "loss": 0.5}')
    return path


def convert(run: Callable[..., Any], path: object, output: object, to: str) -> Any:
    """Runs ``convert``; of what a safetensors file cannot hold, it is told to leave it out."""
    dropping = ["--drop-objects"] if to == "safetensors" else []
    return run("convert", path, output, "--to", to, *dropping)


def check(kind: Kind, verb: str, done: Any, status: int) -> None:
    """Compares how a verb has ended with ``status``, or with how the kind is refused."""
    if kind.refused is not None and not (verb == "verify" and kind.verify):
        status, text = kind.refused
        assert text in done.out + done.err, (verb, done)
    assert done.status == status, (verb, done)
