"""What an option cannot do is refused, and nothing is written."""

from __future__ import annotations

import os
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kinds import KINDS, written
from tensorferry.cli import exits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.beyond_torchft,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

PEER = "http://127.0.0.1:1/x/checkpoint/"
FOR_PEERS = "are for running peers"
CASES = [
    ("convert state.pt OUT --to torch --rank 0", "--rank is for a checkpointer's folder"),
    ("convert writers OUT --to torch --rank 1", "--rank is for a checkpointer's folder"),
    ("convert checkpointers OUT --to torch --step 3", "--step is for --to checkpoint"),
    ("convert state.pt OUT.safetensors --drop-objects", "--drop-objects is for --to safetensors"),
    ("convert writers OUT --to torch --unverified", "--unverified is not for"),
    ("convert megatron OUT.safetensors", "can be converted to dcp or torch-dcp, not to tensorferry"),
    ("convert megatron OUT --to dcp --rank 0", "--rank is for a checkpointer's folder"),
    ("convert megatron OUT --to dcp --step 3", "--step is for --to checkpoint"),
    ("convert megatron OUT --to dcp --drop-objects", "--drop-objects is for --to safetensors"),
    ("convert megatron OUT --to dcp --only model", "--only is not for a checkpoint of Megatron"),
    ("convert megatron OUT --to dcp --unverified", "--unverified is not for"),
    ("inspect state.pt --step 3", FOR_PEERS),
    ("serve state.pt", "run `tensorferry convert state.pt OUT --to tensorferry`"),
    ("serve megatron", "--to dcp`, and serve OUT"),
    ("inspect checkpointers --timeout 5", FOR_PEERS),
    ("inspect . --digests", "Name one of what is in it"),
    ("diff state.pt state.pt --timeout 5", FOR_PEERS),
    (f"pull {PEER} -o s3://bucket/x --force", "--force replaces nothing in an object store"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("kinds")
    for kind in KINDS.values():
        if kind.name in ("state.pt", "writers", "checkpointers", "megatron"):
            written(kind, made, with_notes=False)
    return made


@pytest.mark.parametrize(("line", "text"), CASES)
def test_refused(line: str, text: str, folder: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = sorted(os.listdir(folder))
    done = run(*line.split())
    assert done.status == (3 if line.startswith("inspect .") else 2), done
    assert text in done.err
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("is_full", [True, False])
def test_what_torch_fails_with_is_told(
    is_full: bool, folder: Path, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch says of a full disk that it is at an unexpected position; of other failures, the disk is not the cause."""

    def save(*_: Any) -> None:
        try:
            raise OSError(28, "No space left on device") if is_full else ValueError("not of the system")
        except (OSError, ValueError):
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 - as torch does

    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(os, "statvfs", lambda _: types.SimpleNamespace(f_bavail=0, f_frsize=1))
    done = run("convert", folder / "state.pt", tmp_path / "out.pt")
    assert done.status == (exits.UNAVAILABLE if is_full else exits.BUG), done
    assert ("No space left on device" if is_full else "unexpected pos") in done.err
    assert os.listdir(tmp_path) == []
