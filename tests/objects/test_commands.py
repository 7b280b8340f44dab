"""The command line takes URLs: inspect, verify, diff, convert, copy, pull."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp

from stores import FORBIDDEN, Gateway, client, objects, put_folder
from tensorferry import HTTPTransport
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.cli import copying, exits, places
from tensorferry.cli.app import run
from tensorferry.dcp import FileReader, FileWriter, PeerWriter
from tensorferry.errors import CorruptCheckpoint, IncompleteCheckpoint, SourceChanged
from tensorferry.storage import copies
from tensorferry.storage.folder import read_index
from tensorferry.storage.lineage import remove_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def state(seed=0):
    torch.manual_seed(seed)
    return {"w": torch.randn(300, 40), "b": torch.randn(17), "o": {"x": 1}}


def save(value, place):
    dcp.save(value, storage_writer=FileWriter(place), no_dist=True)


def told(capsys, *arguments):
    status = run([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.process
def test_inspect(any_server, capsys):
    server = any_server
    save(state(), server.place)
    status, found = told(capsys, "inspect", server.place, "--digests")
    assert status == 0
    leaves = {leaf["path"]: leaf for leaf in found[0]["leaves"]}
    assert leaves["w"]["shape"] == [300, 40]
    assert leaves["w"]["digest"]
    save(state(), f"{server.place}/below/one")
    status, found = told(capsys, "inspect", f"{server.place}/below")
    assert [one["name"] for one in found["checkpoints"]] == ["one"]


def test_verify_lists_all_damaged_runs(server, capsys):
    save(state(), server.place)
    assert told(capsys, "verify", server.place)[0] == 0
    key, data = next((k, d) for k, d in objects(server.url, server.prefix).items() if "/rank" in k)
    changed = bytearray(data)
    for at in (4096 + 10, 4096 + 5000, 4096 + 20_000):
        changed[at] ^= 1
    client(server.url).put_object(Bucket="bucket", Key=key, Body=bytes(changed))
    status, found = told(capsys, "verify", server.place)
    assert status == 4
    damaged = [one for file in found["files"] for one in file["damaged"]]
    assert [one["start"] for one in damaged] == [0, 4608, 19968]
    assert damaged[0]["entries"]


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


def test_diff(server, tmp_path, capsys):
    save(state(1), server.place)
    save(state(1), tmp_path / "same")
    save({**state(1), "b": torch.ones(17)}, tmp_path / "other")
    assert told(capsys, "diff", server.place, str(tmp_path / "same"))[0] == 0
    status, found = told(capsys, "diff", str(tmp_path / "other"), server.place)
    assert status == 1
    assert [one["path"] for one in found["differences"]] == ["b"]


def test_copy_both_ways(server, tmp_path, capsys):
    save(state(2), tmp_path / "there")
    assert told(capsys, "copy", str(tmp_path / "there"), server.place)[0] == 0
    assert {k.rpartition("/")[2]: d for k, d in objects(server.url, server.prefix).items()} == {
        path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()
    }
    assert told(capsys, "copy", server.place, str(tmp_path / "back"))[0] == 0
    for path in (tmp_path / "there").iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    assert run(["copy", str(tmp_path / "there"), server.place]) == 2
    assert run(["copy", server.place, str(tmp_path / "back")]) == 2
    assert run(["copy", server.place, f"{server.place}-2"]) == 0
    assert len(objects(server.url, f"{server.prefix}-2")) == 3


TAKEN = [".metadata", "index.safetensors", "model.safetensors.index.json", "common.pt", "notes.txt", "below/notes.txt"]


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_in_a_bucket_is_not_overwritten(server, tmp_path, capsys, name):
    save(state(2), tmp_path / "there")
    key = f"{server.prefix}/{name}"
    client(server.url).put_object(Bucket="bucket", Key=key, Body=b"theirs")
    for verb in (["copy"], ["convert", "--to", "dcp"]):
        assert run([*verb, str(tmp_path / "there"), server.place]) == 2
        assert "something is there already" in capsys.readouterr().err
    assert objects(server.url, server.prefix) == {key: b"theirs"}


def test_a_file_in_a_bucket_is_not_overwritten(server, tmp_path, capsys):
    torch.save(state(2), tmp_path / "a.pt")
    for suffix in ("", "/below"):
        place = f"{server.place}-{len(suffix)}/a.pt"
        client(server.url).put_object(Bucket="bucket", Key=place.removeprefix("s3://bucket/") + suffix, Body=b"theirs")
        assert run(["copy", str(tmp_path / "a.pt"), place]) == 2
        assert run(["convert", str(tmp_path / "a.pt"), place]) == 2
    assert set(objects(server.url, server.prefix).values()) == {b"theirs"}
    capsys.readouterr()


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


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_a_copy_whose_list_of_files_is_outdated_when_it_begins_fails(server, tmp_path, monkeypatch, change):
    there = tmp_path / "there"
    save_one(there)
    after = {"replaced": lambda: save_one(there), "removed": lambda: remove_checkpoint(there, read_index(there).commit)}
    then(monkeypatch, copying, "_files_of", after[change])
    error = SourceChanged if change == "replaced" else IncompleteCheckpoint
    assert run(["copy", str(there), server.place]) == exits.status_of(error(""))
    assert objects(server.url, server.prefix) == {}


def test_a_copy_takes_no_file_for_another_of_its_name(server, tmp_path, capsys):
    for value, name in enumerate("ab"):
        save_one(tmp_path / name, float(value))
    (ours,), (theirs,) = ((tmp_path / name).glob("rank*") for name in "ab")
    ours.write_bytes(theirs.read_bytes())
    assert run(["copy", str(tmp_path / "a"), server.place]) == exits.UNREADABLE
    assert "not the file that the index names" in capsys.readouterr().err
    assert objects(server.url, server.prefix) == {}


@pytest.mark.parametrize(("here", "there"), [("a", "a.safetensors"), ("a.safetensors", "a.pt")])
def test_a_damaged_file_is_not_copied_whatever_it_is_called(server, tmp_path, here, there):
    torch.save({"w": torch.ones(5000)}, tmp_path / "a.pt")
    assert run(["convert", str(tmp_path / "a.pt"), str(tmp_path / "whole.safetensors")]) == 0
    data = bytearray((tmp_path / "whole.safetensors").read_bytes())
    data[4096 + 100] ^= 1
    client(server.url).put_object(Bucket="bucket", Key=f"{server.prefix}/{there}", Body=bytes(data))
    place = f"{server.place}/{there}"
    assert run(["copy", place, str(tmp_path / here)]) == exits.UNREADABLE
    assert not (tmp_path / here).exists()
    with pytest.raises(CorruptCheckpoint), copying.local(places.find(place)):
        pass
    assert run(["copy", place, f"{place}.safetensors"]) == exits.UNREADABLE
    assert run(["copy", place, f"{place}.safetensors", "--unverified"]) == 0


def test_a_copy_whose_answers_are_lost_is_there(server, tmp_path, monkeypatch):
    save(state(2), tmp_path / "there")
    lost = set()
    with Gateway(server.url) as between:

        def act(_, method, path):
            if method != "PUT" or path in lost:
                return None
            lost.add(path)
            name = path.rpartition("/")[2]
            data = (tmp_path / "there" / name).read_bytes()
            client(server.url).put_object(Bucket="bucket", Key=f"{server.prefix}/{name}", Body=data)
            return "break"

        between.act = act
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        assert run(["copy", str(tmp_path / "there"), server.place]) == 0
    assert len(lost) == 3


def test_convert_from_and_to_a_store(server, tmp_path, capsys):
    save(state(3), server.place)
    assert run(["convert", server.place, str(tmp_path / "a.pt")]) == 0
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["w"], state(3)["w"])
    assert run(["convert", str(tmp_path / "a.pt"), f"{server.place}-2", "--to", "dcp"]) == 0
    into = {"w": torch.zeros(300, 40)}
    dcp.load(into, storage_reader=FileReader(f"{server.place}-2"), no_dist=True)
    assert torch.equal(into["w"], state(3)["w"])
    capsys.readouterr()


def test_a_safetensors_file_of_another_program(server, tmp_path, capsys):
    from safetensors.torch import save_file

    (tmp_path / "m").mkdir()
    save_file({"w": torch.ones(4, 5)}, tmp_path / "m" / "model.safetensors")
    put_folder(server.url, tmp_path / "m", server.prefix)
    status, found = told(capsys, "inspect", f"{server.place}/model.safetensors")
    assert status == 0
    assert found[0]["leaves"][0]["shape"] == [4, 5]
    assert told(capsys, "verify", f"{server.place}/model.safetensors")[0] == 1


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
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    client(server.url).create_bucket(Bucket="alone")
    assert run(["convert", str(tmp_path / "a.pt"), "s3://alone", "--to", "checkpoint"]) == 0
    assert run(["diff", "s3://alone", str(tmp_path / "a.pt")]) == 0
    capsys.readouterr()


def test_pull_into_a_store(server, tmp_path, monkeypatch, capsys, published):
    """Nothing is left in the folders of this machine, and nothing is replaced in the store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file, folder = f"{server.place}/a.safetensors", f"{server.place}/step-5"
    status, told = pulled(capsys, published, "--output", file)
    assert (status, told["path"], told["step"]) == (0, file, 5)
    assert torch.equal(load_file(file)["w"], state(4)["w"])
    status, told = pulled(capsys, published, "--into-folder", folder)
    assert (status, told["path"], told["step"]) == (0, folder, 5)
    assert torch.equal(SyncCheckpointer().load(folder)["w"], state(4)["w"])
    assert told_of_verify(capsys, folder) == 0
    held = objects(server.url, server.prefix)
    for where in (["--output", file], ["--into-folder", folder], ["--output", f"{server.place}/step-5"]):
        assert run(["pull", published, *where]) == 2
        assert "something is there already" in capsys.readouterr().err
    assert objects(server.url, server.prefix) == held
    assert not list(tmp_path.iterdir())


def test_a_pull_whose_copy_is_refused_leaves_nothing_here(gateway, server, tmp_path, monkeypatch, capsys, published):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gateway.act = lambda _, method, path: FORBIDDEN if method == "PUT" and "index" in path else None
    assert run(["pull", published, "--into-folder", server.place]) == exits.UNAVAILABLE
    assert "the store does not permit it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert run(["pull", published, "--into-folder", server.place]) == 2


def test_a_publication_of_ranks_is_pulled_into_a_store(server, capsys):
    peers = PeerWriter(interface="127.0.0.1")
    dcp.save(state(6), storage_writer=peers, no_dist=True)
    try:
        assert pulled(capsys, peers.metadata(), "--into-folder", server.place)[0] == 0
        into = {"w": torch.zeros(300, 40)}
        dcp.load(into, storage_reader=FileReader(server.place), no_dist=True)
        assert torch.equal(into["w"], state(6)["w"])
    finally:
        peers.shutdown()


def pulled(capsys, metadata, *where):
    status = run(["pull", metadata, *where, "--quiet", "--json"])
    return status, json.loads(capsys.readouterr().out)


def told_of_verify(capsys, place):
    return told(capsys, "verify", place)[0]
