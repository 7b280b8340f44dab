"""Live checkpoints: which metadata opens them, what ends them, and which faults they survive."""

from __future__ import annotations

import pickle
import urllib.error
import urllib.request
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from job import Job

from networked import networked
from nights import mostly_at_night
from tensorferry import Network
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter
from tensorferry.dcp.peer_writer import _Done
from tensorferry.errors import InvalidArgument
from tensorferry.storage.container import Container

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore::FutureWarning")

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def open_writer():
    opened = []

    def open_one(timeout=TIMEOUT, **options):
        opened.append(PeerWriter(timeout, **networked({"interface": "127.0.0.1", **options})))
        return opened[-1]

    yield open_one
    for writer in opened:
        writer.shutdown()


def read(metadata, like, **options):
    found = {name: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for name, v in like.items()}
    options = {"timeout": TIMEOUT} | options
    dcp.load(found, storage_reader=PeerReader(metadata, **options))
    return found


def test_what_is_published_is_the_memory_itself_or_a_copy(open_writer):
    for snapshot, seen in (("borrow", 7.0), ("copy", 1.0)):
        state = {"x": torch.ones(500_000), "text": "a"}
        writer = open_writer(snapshot=snapshot)
        dcp.save(state, storage_writer=writer)
        state["x"].fill_(7)
        found = read(writer.metadata(), state)
        assert found["x"].unique().tolist() == [seen]
        assert found["text"] == "a"


def test_every_save_replaces_the_one_before(open_writer):
    writer = open_writer()
    strings = []
    for value in range(3):
        dcp.save({"x": torch.full((9,), value)}, storage_writer=writer)
        strings.append(writer.metadata())
        assert read(strings[-1], {"x": torch.full((9,), value)})["x"].tolist() == [value] * 9
    assert len(set(strings)) == 3
    with pytest.raises(dcp.CheckpointException, match="serving 3 but got step=1"):
        read(strings[0], {"x": torch.zeros(9, dtype=torch.int64)})


def test_a_rank_that_cannot_publish_its_part_says_so(open_writer, monkeypatch, caplog):
    writer = open_writer()
    state = {"x": torch.ones(9)}

    def refuse(*_, **__):
        raise MemoryError("no room")

    # On ranks other than the first, the last step is called while torch unpickles metadata, and may not raise.
    monkeypatch.setattr(writer, "finish", lambda **_: None)
    monkeypatch.setattr(Container, "publish", refuse)
    dcp.save(state, storage_writer=writer)
    pickle.loads(pickle.dumps(_Done(writer._step, writer._urls)))
    assert "this rank's part of the checkpoint will be missing for readers" in caplog.text
    with pytest.raises(InvalidArgument, match=r"could not publish its part of it \(MemoryError: no room\).*Save again"):
        writer.metadata()
    monkeypatch.undo()
    dcp.save(state, storage_writer=writer)
    assert read(writer.metadata(), state)["x"].tolist() == [1.0] * 9


@pytest.mark.waits
def test_withdrawn_state_is_not_read_any_more(open_writer):
    state = {"x": torch.ones(1000)}
    writer = open_writer(timeout=timedelta(seconds=1))
    with pytest.raises(InvalidArgument, match="nothing is published"):
        writer.metadata()
    dcp.save(state, storage_writer=writer)
    metadata = writer.metadata()
    writer.withdraw()
    writer.withdraw()
    with pytest.raises(InvalidArgument, match="nothing is published"):
        writer.metadata()
    with pytest.raises(dcp.CheckpointException, match="503"):
        read(metadata, state, timeout=timedelta(seconds=4))


def test_a_string_opens_and_nothing_else_does(open_writer):
    state = {"x": torch.ones(10)}
    writer = open_writer()
    dcp.save(state, storage_writer=writer)
    scheme, step, url = writer.metadata().split()
    assert urllib.request.urlopen(f"{url}{step}.safetensors").status == 200
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url.replace(url.split('/')[3], '0' * 32)}{step}.safetensors")
    for wrong in ("", "x", f"{scheme} {step}", f"{scheme} x {url}", f"other/1 {step} {url}", url):
        with pytest.raises(dcp.CheckpointException, match=r"metadata\(\) of a PeerWriter"):
            read(wrong, state)
    found = {"x": torch.zeros(10)}
    dcp.load(found, checkpoint_id=writer.metadata(), storage_reader=PeerReader(timeout=TIMEOUT))
    assert found["x"].sum() == 10


def test_secret_and_tls(open_writer, monkeypatch):
    state = {"x": torch.randn(300_000)}
    secret = b"0123456789abcdef0123456789abcdef"
    writer = open_writer(secret=secret, tls=True)
    dcp.save(state, storage_writer=writer)
    metadata = writer.metadata()
    assert "https://sha256-" in metadata
    assert torch.equal(read(metadata, state, secret=secret)["x"], state["x"])
    for options in ({}, {"secret": secret[::-1]}):
        with pytest.raises(dcp.CheckpointException, match="secret"):
            read(metadata, state, **options)
    open_one = open_writer()
    dcp.save(state, storage_writer=open_one)
    with pytest.raises(dcp.CheckpointException, match=r"rank 0, at .* does not encrypt"):
        read(open_one.metadata(), state, network=Network(tls=True))
    monkeypatch.setenv("TENSORFERRY_SECRET", secret.decode())
    assert torch.equal(read(metadata, state)["x"], state["x"])


def test_a_writer_stays_in_its_process(open_writer):
    with pytest.raises(InvalidArgument, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(open_writer())
    with pytest.raises(InvalidArgument, match="snapshot"):
        open_writer(snapshot="steal")
    with pytest.raises(InvalidArgument, match="max_bandwidth"):
        open_writer(max_bandwidth=0)


class Unpicklable:
    def __reduce__(self):
        raise ValueError("not this one")


def _save_number(kept, value, folder):
    writer = kept.setdefault("writer", PeerWriter(timedelta(seconds=2), interface="127.0.0.1"))
    rank = torch.distributed.get_rank()
    kept["state"] = {f"x{rank}": torch.full((9,), value + rank)}
    dcp.save(kept["state"], storage_writer=writer)
    dcp.save(kept["state"], storage_writer=FileWriter(folder))
    return writer.metadata(), writer._server.step, writer._server.allowed


def _fail(kept, odd, folder):
    """Makes saves in which the rank ``odd`` fails; returns what this rank serves afterwards."""
    writer = kept.setdefault("writer", PeerWriter(timedelta(seconds=2), interface="127.0.0.1"))
    rank = torch.distributed.get_rank()
    state = {"odd": Unpicklable()} if rank == odd else {f"x{rank}": torch.zeros(9)}
    for each in (writer, FileWriter(folder)):
        with pytest.raises(dcp.CheckpointException, match="odd cannot be saved"):
            dcp.save(state, storage_writer=each)
    with pytest.raises(InvalidArgument, match="the last save has failed"):
        writer.metadata()
    return writer._server.step, writer._server.allowed


def _shut_down(kept):
    kept["writer"].shutdown()


@pytest.mark.process
@pytest.mark.parametrize("odd", mostly_at_night([0, 1]))
def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_one_before_stays(odd, tmp_path):
    with Job(2) as job:
        assert job.run(_fail, odd, tmp_path) == [(None, False)] * 2
        published = job.run(_save_number, 3.0, tmp_path)
        assert published[0] == published[1]
        metadata, step, allowed = published[0]
        assert (step, allowed) == (2, True)
        # The previous publication stays, on every rank.
        assert job.run(_fail, odd, tmp_path) == [(2, True)] * 2
        for reader in (PeerReader(metadata, timeout=TIMEOUT), FileReader(tmp_path)):
            found = {"x0": torch.zeros(9), "x1": torch.zeros(9)}
            dcp.load(found, storage_reader=reader)
            assert [found[f"x{rank}"].unique().tolist() for rank in range(2)] == [[3.0], [4.0]]
        metadata, *_ = job.run(_save_number, 7.0, tmp_path)[0]
        assert read(metadata, {"x1": torch.zeros(9)})["x1"].unique().tolist() == [8.0]
        job.run(_shut_down)
