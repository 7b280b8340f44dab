"""``convert`` of what several ranks have saved: tensors that are spread over them are whole, or nothing is written."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file as load_safetensors

import forked
from checkpoint_ranks import run
from rank_worker import SHARDED, TENSORS
from tensorferry.checkpointing import SyncCheckpointer
from tensorferry.cli import exits
from tensorferry.storage.folder import read_index

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.beyond_torchft,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

WHOLE = {name: value for name, (value, *_) in TENSORS.items()} | {"sharded": SHARDED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, with DTensors and a ShardedTensor."""
    folder = tmp_path_factory.mktemp("ranks") / "c"
    run("save", 2, folder)
    return folder


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tensorferry", "convert", *arguments]
    return forked.run(command, timeout=120, capture_output=True, text=True)


def same(found: dict, rank: int = 0) -> None:
    for name, value in WHOLE.items():
        assert type(found[name]) is torch.Tensor, name
        assert torch.equal(found[name], value), name
    assert found["plain"].tolist() == [rank] * 3


def test_torch_gets_whole_tensors_and_the_plain_values_of_one_rank(folder, tmp_path):
    ended = convert(folder, tmp_path / "s.pt")
    assert ended.returncode == exits.OK, ended.stderr
    assert "spread over the 2 ranks are whole in the output; all other values are those of rank 0" in ended.stderr
    assert "DeviceMesh" not in ended.stderr
    same(torch.load(tmp_path / "s.pt"))
    ended = convert(folder, tmp_path / "one.pt", "--rank", "1", "--json")
    assert json.loads(ended.stdout)["rank"] == 1
    same(torch.load(tmp_path / "one.pt"), 1)


def test_a_checkpoint_and_safetensors_have_whole_tensors(folder, tmp_path):
    assert convert(folder, tmp_path / "c", "--to", "checkpoint").returncode == exits.OK
    same(SyncCheckpointer().load(tmp_path / "c"))
    ended = convert(folder, tmp_path / "t", "--to", "safetensors", "--drop-objects")
    assert ended.returncode == exits.OK, ended.stderr
    same(load_safetensors(tmp_path / "t"))


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp", "torch-dcp"])
def test_the_file_of_one_rank_alone_is_refused(folder, tmp_path, to):
    file = folder / read_index(folder).files[1][0]
    dropping = ["--drop-objects"] if to == "safetensors" else []
    ended = convert(file, tmp_path / "o", "--to", to, *dropping)
    assert ended.returncode == exits.UNREADABLE, ended.stderr
    assert "is a part of a tensor that is spread over ranks" in ended.stderr
    assert not (tmp_path / "o").exists()
