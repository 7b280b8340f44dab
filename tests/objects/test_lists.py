"""What stores list is long, and may have keys that are none of ours: no save depends on it, and no load."""

from __future__ import annotations

import dcp_doors
import pytest
import torch

from stores import BUCKET, client
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint
from tensorferry.errors import StoreRefused
from tensorferry.storage.places import any_place

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::UserWarning")]


def put(server, key):
    client(server.url).put_object(Bucket=BUCKET, Key=f"{server.prefix}/{key}", Body=b"x")


@pytest.mark.parametrize("key", ["run/step-1/./x", "run/step-1/zz//x", "run/zz/./x", "zz//x"])
def test_keys_that_are_no_paths(server, key):
    by_dcp, by_checkpointer = f"{server.place}/run/step-1", f"{server.place}/run/step-2"
    put(server, key)
    put(server, key.replace("step-1", "step-2"))
    for value in (1.0, 2.0):
        dcp_doors.save({"w": torch.full((30,), value)}, by_dcp)
        SyncCheckpointer(keep_last=1).save(by_checkpointer, {"w": torch.full((30,), value)})
    assert dcp_doors.load({"w": torch.zeros(30)}, by_dcp)["w"].unique() == 2.0
    assert SyncCheckpointer().load(by_checkpointer)["w"].unique() == 2.0
    assert latest_checkpoint(f"{server.place}/run") == by_checkpointer


def test_a_key_that_hides_all_checkpoints_beside_it_is_named(server, caplog):
    """The client of stores has no way around one among the folders themselves; what a run has saved it still knows."""
    put(server, "run//x")
    run = SyncCheckpointer(keep_last=1)
    for step in (1, 2):
        run.save(f"{server.place}/run/step-{step}", {"w": torch.zeros(3)}, step=step)
    with pytest.raises(StoreRefused, match=rf"{server.prefix}/run//.*Remove that object"):
        latest_checkpoint(f"{server.place}/run")
    assert not any_place(f"{server.place}/run/step-1").is_dir()
    assert SyncCheckpointer().load(f"{server.place}/run/step-2")["w"].unique() == 0.0
    assert "does not remove what earlier runs have saved" in caplog.text
