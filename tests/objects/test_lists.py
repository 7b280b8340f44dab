"""What stores list is long, and may have keys that are none of ours: no save depends on it, and no load."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from stores import BUCKET, client
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint
from tensorferry.dcp import FileReader, FileWriter, own_errors
from tensorferry.errors import StoreRefused
from tensorferry.storage.places import any_place

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::UserWarning")]


def save_dcp(place, value):
    with own_errors():
        dcp.save({"w": torch.full((30,), value)}, storage_writer=FileWriter(place), no_dist=True)


def load_dcp(place):
    found = {"w": torch.zeros(30)}
    with own_errors():
        dcp.load(found, storage_reader=FileReader(place), no_dist=True)
    return found["w"].unique().item()


def save_checkpointer(place, value):
    SyncCheckpointer(keep_last=1).save(place, {"w": torch.full((30,), value)})


def load_checkpointer(place):
    return SyncCheckpointer().load(place)["w"].unique().item()


DOORS = pytest.mark.parametrize(
    ("save", "load"), [(save_dcp, load_dcp), (save_checkpointer, load_checkpointer)], ids=["dcp", "checkpointer"]
)


def put(server, *keys):
    s3 = client(server.url)
    for key in keys:
        s3.put_object(Bucket=BUCKET, Key=f"{server.prefix}/{key}", Body=b"x")
    s3.close()


@DOORS
@pytest.mark.parametrize("key", ["run/step-1/./x", "run/step-1/zz//x", "run/zz/./x", "zz//x"])
def test_keys_that_are_no_paths(server, save, load, key):
    place = f"{server.place}/run/step-1"
    put(server, key)
    for value in (1.0, 2.0):
        save(place, value)
    assert load(place) == 2.0
    assert latest_checkpoint(f"{server.place}/run") == (None if save is save_dcp else place)


def test_a_key_that_hides_all_checkpoints_beside_it_is_named(server, caplog):
    """The client of stores has no way around one among the folders themselves; what a run has saved it still knows."""
    put(server, "run//x")
    run = SyncCheckpointer(keep_last=1)
    for step in (1, 2):
        run.save(f"{server.place}/run/step-{step}", {"w": torch.zeros(3)}, step=step)
    with pytest.raises(StoreRefused, match=rf"{server.prefix}/run//.*Remove that object"):
        latest_checkpoint(f"{server.place}/run")
    assert not any_place(f"{server.place}/run/step-1").is_dir()
    assert load_checkpointer(f"{server.place}/run/step-2") == 0.0
    assert "does not remove what earlier runs have saved" in caplog.text
