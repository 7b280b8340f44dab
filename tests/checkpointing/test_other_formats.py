"""Who comes from another format is told so, instead of beginning at step 0 without a word."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint
from tensorferry.cli.app import run
from tensorferry.dcp import FileWriter
from tensorferry.errors import ProtocolError

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"),
]


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "tensorferry"]


def save_torch(folder):
    state = {"weight": torch.arange(4.0)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return state


@pytest.mark.parametrize(
    ("save", "what"),
    [
        (save_torch, "torch.distributed.checkpoint"),
        (lambda at: dcp.save({}, storage_writer=FileWriter(at), no_dist=True), "tensorferry.dcp.FileWriter"),
        (lambda at: at.mkdir() or torch.save({}, at / "checkpoint_0.pt"), "torch's CheckpointWriter"),
    ],
)
def test_latest_names_the_checkpoints_of_other_formats(save, what, tmp_path, caplog):
    save(tmp_path / "step-1")
    with closing(SyncCheckpointer()) as checkpointer:
        assert checkpointer.latest(tmp_path) is None
        assert latest_checkpoint(tmp_path) is None
        assert len(lines(caplog)) == 2
        for line in lines(caplog):
            assert f"{tmp_path / 'step-1'} ({what})" in line
            assert "tensorferry convert OLD NEW --to checkpoint" in line
        caplog.clear()
        checkpointer.save(tmp_path / "step-2", {"step": 2})
        assert checkpointer.latest(tmp_path) == str(tmp_path / "step-2")
        assert not lines(caplog)


def test_a_load_of_what_torch_has_saved_says_how_to_convert_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = save_torch(tmp_path / "old")
    with closing(SyncCheckpointer()) as checkpointer:
        with pytest.raises(ProtocolError, match=r"holds a checkpoint of torch\.distributed.* --to checkpoint"):
            checkpointer.load("old", {"weight": torch.zeros(4)})
        assert run(["convert", "old", "new", "--to", "checkpoint"]) == 0
        assert torch.equal(checkpointer.load("new")["weight"], state["weight"])
