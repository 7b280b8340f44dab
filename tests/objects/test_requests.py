"""How many requests a save makes besides those of its data, whatever else is in the bucket."""

from __future__ import annotations

import pytest
import torch
from dcp_doors import load, save

from stores import BUCKET, client, objects
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint
from tensorferry.storage.places import any_place

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::UserWarning")]
MOST = 6


def besides_data(gateway):
    return [one for one in gateway.seen if not (one[0] in ("PUT", "POST") and "/rank" in one[1])]


def test_a_steady_save_of_one_rank(gateway, server):
    s3 = client(server.url)
    # As many before the names of a save as a page has, and behind them.
    for n in range(1000):
        s3.put_object(Bucket=BUCKET, Key=f"{server.prefix}/{'az'[n % 2]}-{n}", Body=b"")
    s3.close()
    for value in (1.0, 2.0, 3.0):
        gateway.seen.clear()
        save({"w": torch.full((30,), value)}, server.place)
    assert len(besides_data(gateway)) <= MOST, besides_data(gateway)
    assert load({"w": torch.zeros(30)}, server.place)["w"].unique() == 3.0
    assert sum("/rank" in f"/{key}" for key in objects(server.url, f"{server.prefix}/rank")) == 1


def test_a_save_of_a_checkpointer_into_a_new_folder(gateway, server):
    run = SyncCheckpointer()
    for step in (1, 2, 3):
        gateway.seen.clear()
        run.save(f"{server.place}/step-{step}", {"w": torch.full((30,), float(step))}, step=step)
    assert len(besides_data(gateway)) <= MOST, besides_data(gateway)
    gateway.seen.clear()
    assert any_place(server.place).is_dir()
    assert not any_place(f"{server.place}/st").is_dir()
    assert len(gateway.seen) == 2
    assert latest_checkpoint(server.place) == f"{server.place}/step-3"
