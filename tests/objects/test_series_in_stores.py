"""What a save and a search ask of the checkpoints beside has one deadline, and its failure is no "there is none"."""

from __future__ import annotations

import threading

import pytest
import torch

from stores import BUCKET, FORBIDDEN, client, objects
from tensorferry.checkpointing import SyncCheckpointer
from tensorferry.checkpointing.latest import find_latest
from tensorferry.checkpointing.ranks import Ranks
from tensorferry.errors import StoreRefused, TensorferryError
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


def test_a_refusal_to_rank_0_is_told_to_all_ranks(gateway, series):
    gateway.act = lambda *_: FORBIDDEN
    told, is_told = [], threading.Event()

    def first(value):
        told.append(value)
        is_told.set()
        return value

    def other(_):
        is_told.wait(30)
        return told[0]

    root = any_place(series.place)
    with pytest.raises(StoreRefused):
        find_latest(root, Ranks(0, 2, first), None)
    with pytest.raises(TensorferryError, match=r"rank 0 cannot find the newest checkpoint: StoreRefused.*AccessDenied"):
        find_latest(root, Ranks(1, 2, other), None)
