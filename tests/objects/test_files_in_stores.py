"""``load_file`` takes the URL of a file: a container, one of another program, or what ``torch.save`` wrote."""

from __future__ import annotations

import io

import pytest
import torch

from stores import BUCKET, client, objects
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.errors import (
    IncompleteCheckpoint,
    ProtocolError,
    StateMismatch,
    UnsafePickle,
)


def state(seed=1):
    return {"w": torch.full((300, 70), float(seed)), "step": seed, "o": {"x": [1, 2]}}


def put(server, name, data):
    client(server.url).put_object(Bucket=BUCKET, Key=f"{server.prefix}/{name}", Body=data)
    return f"{server.place}/{name}"


def archive(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.fixture
def saved(server):
    """The URL of a rank's file of a checkpoint."""
    SyncCheckpointer().save(server.place, state())
    (key,) = (key for key in objects(server.url, server.prefix) if "/rank" in key)
    return f"s3://{BUCKET}/{key}"


def test_a_rank_s_file(saved):
    found = load_file(saved)
    assert torch.equal(found["w"], state()["w"])
    assert (found["step"], found["o"]) == (1, {"x": [1, 2]})
    into = {"w": torch.zeros(300, 70)}
    at = into["w"].data_ptr()
    assert load_file(saved, into) is into
    assert torch.equal(into["w"], state()["w"])
    assert into["w"].data_ptr() == at


def test_what_torch_save_wrote(server, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    url = put(server, "a.pt", archive(state(2)))
    assert torch.equal(load_file(url)["w"], state(2)["w"])
    into = {"w": torch.zeros(300, 70)}
    assert load_file(url, into) is into
    assert torch.equal(into["w"], state(2)["w"])
    with pytest.raises(StateMismatch):
        load_file(url, {"w": torch.zeros(3), "step": 0})
    assert SyncCheckpointer().load(url)["step"] == 2
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_torch_s_checkpoint_writer(server):
    put(server, "checkpoint_0.pt", archive(state(3)))
    assert SyncCheckpointer().load(server.place)["step"] == 3


def test_messages_name_the_url(server):
    for name, data, error in (
        ("cut.pt", archive(state())[:5000], ProtocolError),
        ("code.pt", archive({"f": print}), UnsafePickle),
        ("text.pt", b"nothing of this kind", ProtocolError),
    ):
        with pytest.raises(error, match=f"{server.place}/{name}"):
            load_file(put(server, name, data))
    with pytest.raises(IncompleteCheckpoint, match=f"{server.place}/nothing"):
        load_file(f"{server.place}/nothing")
