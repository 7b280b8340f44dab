"""``load_file`` takes the URL of a file: a container, one of another program, or what ``torch.save`` wrote."""

from __future__ import annotations

import io
from datetime import timedelta

import pytest
import torch
from safetensors.torch import save

from stores import BUCKET, FORBIDDEN, client, environment, objects
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InvalidArgument,
    ProtocolError,
    StateMismatch,
    StoreRefused,
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


def test_damage_is_found(server, saved):
    key = saved.removeprefix(f"s3://{BUCKET}/")
    data = bytearray(objects(server.url, key)[key])
    data[data.index(state()["w"].numpy().tobytes()[:64]) + 5000] ^= 1
    client(server.url).put_object(Bucket=BUCKET, Key=key, Body=bytes(data))
    with pytest.raises(CorruptCheckpoint):
        load_file(saved)


def test_a_file_of_another_program(server):
    """It has no whole state, as in a folder."""
    url = put(server, "model.safetensors", save({"w": torch.arange(12.0)}))
    with pytest.raises(ProtocolError, match=f"{url} does not hold a whole state"):
        load_file(url)


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


@pytest.mark.waits
def test_a_refusal_is_told(gateway, saved):
    gateway.act = lambda _, __, path: FORBIDDEN if "/rank" in path else None
    with pytest.raises(StoreRefused, match="does not permit"):
        load_file(saved)


def test_options_of_the_store(server, saved, monkeypatch):
    options = {"endpoint": server.url}
    for name, value in environment(server.url).items():
        monkeypatch.delenv(name)
        if name.startswith("AWS_") and "ENDPOINT" not in name:
            options[name.lower()] = value
    assert load_file(saved, store_options=options, timeout=timedelta(seconds=60))["step"] == 1
    with pytest.raises(InvalidArgument):
        load_file(saved, store_options={"endpoint": 3, "no_such_option": 1})
