"""After ``tensorferry.install()``, torch saves a ``checkpoint_id`` that is the URL of a store with our classes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tensorferry
from stores import objects
from tensorferry.storage.objects import client

pytestmark = pytest.mark.filterwarnings("ignore")
URL = "s3://bucket/run/step-1"


def test_a_checkpoint_id_that_is_a_url(server):
    with tensorferry.install(transport=False):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=server.place, no_dist=True)
        found = {"w": torch.zeros(3)}
        dcp.load(found, checkpoint_id=server.place, no_dist=True)
    assert found["w"].tolist() == [1, 1, 1]
    names = {key.rpartition("/")[2].partition("-")[0] for key in objects(server.url, server.prefix)}
    assert names == {".metadata", "index.safetensors", "rank00000"}


@pytest.mark.parametrize("name", ["FileSystemWriter", "FileSystemReader"])
def test_urls_that_are_left_to_torch(name, monkeypatch):
    with tensorferry.install(transport=False):
        assert getattr(dcp, name).validate_checkpoint_id(URL)
        assert not getattr(dcp, name).validate_checkpoint_id("memory://run/step-1")
        monkeypatch.setattr(client, "is_installed", lambda: False)
        assert not getattr(dcp, name).validate_checkpoint_id(URL)
    assert not getattr(dcp, name).validate_checkpoint_id(URL)
