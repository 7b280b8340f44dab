"""Checkpoints beside each other in a bucket: what a save asks of them has one deadline."""

from __future__ import annotations

import pytest
import torch

from stores import BUCKET, client, objects
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint
from tensorferry.errors import InvalidArgument
from tensorferry.storage.places import any_place
from tensorferry.storage.series import checkpoints

#: Checkpoints beside each other: with a deadline for each of them, the tests here would take minutes.
BESIDE, PATIENCE = 20, 2.0
pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def state(value):
    return {"w": torch.full((30,), float(value))}


@pytest.fixture
def series(server):
    """A series of checkpoints in folders ``step-0`` and so on, all of them copies of one."""
    SyncCheckpointer().save(f"{server.place}/step-0", state(0))
    s3 = client(server.url)
    for key, data in objects(server.url, server.prefix).items():
        for step in range(1, BESIDE):
            s3.put_object(Bucket=BUCKET, Key=key.replace("step-0", f"step-{step}"), Body=data)
    s3.close()
    return server


def is_index_beside(path):
    return path.partition("?")[0].endswith("/index.safetensors") and "/step-99" not in path


@pytest.mark.waits
def test_a_save_waits_once_for_indexes_that_stall(gateway, series, caplog):
    gateway.act = lambda _, method, path: "stall" if is_index_beside(path) and method in ("GET", "HEAD") else None
    SyncCheckpointer(patience=PATIENCE, keep_last=1).save(f"{series.place}/step-99", state(99), step=99)
    assert "does not remove what earlier runs have saved" in caplog.text
    gateway.act = lambda *_: None
    assert len(checkpoints(any_place(series.place))) == BESIDE + 1


def test_a_checkpoint_itself_and_an_object_are_refused(server):
    SyncCheckpointer().save(f"{server.place}/step-1", {"w": torch.ones(3)})
    with pytest.raises(InvalidArgument, match="is a checkpoint itself: give the folder above"):
        latest_checkpoint(f"{server.place}/step-1")
    with pytest.raises(InvalidArgument, match="is an object"):
        latest_checkpoint(f"{server.place}/step-1/index.safetensors")
    assert latest_checkpoint(f"{server.place}/none") is None
