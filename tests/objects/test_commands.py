"""The command line takes URLs: inspect, verify, diff, convert, copy, pull."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp

from stores import Gateway, client, objects, put_folder
from tensorferry import HTTPTransport
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.cli import copies, copying, exits, places
from tensorferry.cli.app import run
from tensorferry.dcp import FileWriter
from tensorferry.errors import SourceChanged

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def state(seed=0):
    torch.manual_seed(seed)
    return {"w": torch.randn(300, 40), "b": torch.randn(17), "o": {"x": 1}}


def save(value, place):
    dcp.save(value, storage_writer=FileWriter(place), no_dist=True)


def told(capsys, *arguments):
    status = run([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "torch's"])
def test_without_the_permission_to_list(server, tmp_path, monkeypatch, capsys, theirs):
    """Stores say then that what is missing may not be read."""
    writer = dcp.FileSystemWriter(tmp_path / "there") if theirs else FileWriter(tmp_path / "there")
    dcp.save(state(), storage_writer=writer, no_dist=True)
    put_folder(server.url, tmp_path / "there", server.prefix)
    held = {f"/bucket/{key}" for key in objects(server.url, server.prefix)}
    with Gateway(server.url) as between:
        between.act = lambda _, __, path: None if path in held else (403, b"<Error><Code>AccessDenied</Code></Error>")
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        for verb in ("inspect", "verify") if not theirs else ("inspect",):
            assert told(capsys, verb, server.place)[0] == 0
        assert run(["inspect", f"{server.place}/nothing"]) == exits.UNAVAILABLE
    assert "does not permit" in capsys.readouterr().err


def test_a_copy_has_the_same_bytes_and_replaces_nothing(server, tmp_path):
    save(state(2), tmp_path / "there")
    steps = [str(tmp_path / "there"), server.place, f"{server.place}-2", str(tmp_path / "back")]
    for source, target in itertools.pairwise(steps):
        assert [run(["copy", source, target]) for _ in range(2)] == [0, 2]
    there, back = ({one.name: one.read_bytes() for one in (tmp_path / name).iterdir()} for name in ("there", "back"))
    assert there == back
    assert len(objects(server.url, f"{server.prefix}-2")) == 3


@pytest.mark.parametrize("name", [".metadata", "below/notes.txt"])
def test_what_is_in_a_bucket_is_not_overwritten(server, tmp_path, capsys, name):
    save(state(2), tmp_path / "there")
    key = f"{server.prefix}/{name}"
    client(server.url).put_object(Bucket="bucket", Key=key, Body=b"theirs")
    for verb in (["copy"], ["convert", "--to", "dcp"]):
        assert run([*verb, str(tmp_path / "there"), server.place]) == 2
        assert "something is there already" in capsys.readouterr().err
    assert objects(server.url, server.prefix) == {key: b"theirs"}


@pytest.mark.parametrize("which", ["rank00000", ".metadata", "index.safetensors"])
def test_what_somebody_else_writes_during_a_copy_stays(server, tmp_path, monkeypatch, capsys, which):
    save(state(2), tmp_path / "there")
    name = next(path.name for path in (tmp_path / "there").iterdir() if path.name.startswith(which))
    with Gateway(server.url) as between:

        def act(_, method, path):
            if method == "PUT" and path.endswith(name):
                client(server.url).put_object(Bucket="bucket", Key=f"{server.prefix}/{name}", Body=b"theirs")

        between.act = act
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        assert run(["copy", str(tmp_path / "there"), server.place]) == 2
    assert objects(server.url, server.prefix)[f"{server.prefix}/{name}"] == b"theirs"
    assert "something is there already" in capsys.readouterr().err


def then(monkeypatch, owner, name, action):
    """Makes ``action`` happen after each call of a function."""
    real = getattr(owner, name)

    def wrapped(*arguments):
        found = real(*arguments)
        action()
        return found

    monkeypatch.setattr(owner, name, wrapped)


def save_one(place, value=0.0):
    SyncCheckpointer().save(place, {"w": torch.full((100,), value)})


def test_a_copy_of_what_a_save_replaces_has_no_index(server, tmp_path, monkeypatch):
    save_one(tmp_path / "there")
    then(monkeypatch, copies, "upload_new", lambda: save_one(tmp_path / "there"))
    assert run(["copy", str(tmp_path / "there"), server.place]) == exits.UNAVAILABLE
    assert [key.rpartition("/")[2][:4] for key in objects(server.url, server.prefix)] == ["rank"]
    save_one(f"{server.place}-2")
    then(monkeypatch, copies, "download_file", lambda: save_one(f"{server.place}-2"))
    assert run(["copy", f"{server.place}-2", str(tmp_path / "back")]) == exits.UNAVAILABLE
    with pytest.raises(SourceChanged), copying.local(places.find(f"{server.place}-2")):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


def test_a_copy_whose_answers_are_lost_is_there(server, tmp_path, monkeypatch):
    save(state(2), tmp_path / "there")
    lost = set()

    def act(_, method, path):
        if method != "PUT" or path in lost:
            return None
        lost.add(path)
        return "lose"

    with Gateway(server.url, act) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        assert run(["copy", str(tmp_path / "there"), server.place]) == 0
    assert len(lost) == 3


@pytest.fixture
def published():
    """The metadata of a transport that serves a state."""
    transport = HTTPTransport(timedelta(seconds=30), interface="127.0.0.1")
    transport.send_checkpoint([1], 5, state(4), timedelta(seconds=30))
    yield transport.metadata()
    transport.shutdown()


def test_folders_in_a_checkpoint_of_megatrons_are_not_left_out_of_a_copy(server, tmp_path, capsys):
    folder = tmp_path / "zarr"
    (folder / "rows").mkdir(parents=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    (folder / "rows/.zarray").write_text("{}")
    torch.save({}, folder / "common.pt")
    assert run(["copy", str(folder), server.place]) == 2
    assert "has folders in it ('rows' for one)" in capsys.readouterr().err
    assert not objects(server.url, server.prefix)
    put_folder(server.url, folder, server.prefix)
    assert run(["copy", server.place, str(tmp_path / "back")]) == 2
    assert "has folders in it ('rows' for one)" in capsys.readouterr().err


def test_a_bucket_is_a_folder_and_no_file(server, published, tmp_path, monkeypatch, capsys):
    torch.save(state(2), tmp_path / "a.pt")
    with Gateway(server.url) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        for verb in (["copy"], ["convert", "--to", "tensorferry"], ["convert", "--to", "torch"]):
            assert run([*verb, str(tmp_path / "a.pt"), "s3://bucket"]) == 2
            assert "s3://bucket is a bucket: name the object" in capsys.readouterr().err
        assert run(["pull", published, "--output", "s3://bucket"]) == 2
        assert "s3://bucket is a bucket: name the object" in capsys.readouterr().err
        assert not list(between.seen)


def test_pull_into_a_store(server, tmp_path, monkeypatch, capsys, published):
    """Nothing is left in the folders of this machine, and nothing is replaced in the store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file, folder = f"{server.place}/a.safetensors", f"{server.place}/step-5"
    for option, path in (("--output", file), ("--into-folder", folder)):
        status, said = told(capsys, "pull", published, option, path, "--quiet")
        assert (status, said["path"], said["step"]) == (0, path, 5)
    assert torch.equal(load_file(file)["w"], state(4)["w"])
    assert torch.equal(SyncCheckpointer().load(folder)["w"], state(4)["w"])
    assert run(["verify", folder]) == 0
    capsys.readouterr()
    held = objects(server.url, server.prefix)
    for where in (["--output", file], ["--into-folder", folder], ["--output", f"{server.place}/step-5"]):
        assert run(["pull", published, *where]) == 2
        assert "something is there already" in capsys.readouterr().err
    assert objects(server.url, server.prefix) == held
    assert not list(tmp_path.iterdir())
