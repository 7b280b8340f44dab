"""A published checkpoint read by torch alone: as a folder at a URL, or as a downloaded one."""

from __future__ import annotations

import dataclasses
import io
import re
import urllib.error
import urllib.request
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from job import Job
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import states
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter, torch_view
from tensorferry.errors import InvalidArgument

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is:UserWarning", "ignore:TypedStorage is:UserWarning", "ignore::FutureWarning"
)


@pytest.mark.parametrize("dtype", [*states.DTYPES, torch.complex128])
def test_archives_are_those_of_torch(dtype):
    for shape in ((), (0, 4), (1,), (7,), (64, 3), (5, 1, 2000)):
        value = states.whole(f"{dtype}", dtype, shape)
        before, behind = torch_view._around(dtype, shape)
        made = before + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() + behind
        ours = torch_view.elements(made, dtype, shape)
        assert (ours is not None) is (dtype in torch_view._STORAGES)
        assert ours is None or torch.equal(ours.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))
        assert torch_view.elements(made + b"x", dtype, shape) is None
        assert torch_view.elements(made, dtype, (*shape, 2)) is None
        if dtype not in torch_view._STORAGES:
            file = io.BytesIO()
            torch.save(value, file)
            assert len(made) == len(file.getvalue())
        found = torch.load(io.BytesIO(made), weights_only=True)
        assert (found.dtype, found.shape) == (dtype, value.shape)
        assert torch.equal(found.view(torch.uint8) if shape else found, value.view(torch.uint8) if shape else value)


def _publish(kept, turn):
    kept["state"] = states.state(turn, blank=False)
    kept["state"]["odd"] = torch.sparse_coo_tensor([[1, 3]], [2.0, 4.0], (5,), check_invariants=False)
    kept["writer"] = PeerWriter(states.TIMEOUT, interface="127.0.0.1")
    dcp.save(kept["state"], storage_writer=kept["writer"])
    return kept["writer"].folder()


def _end(kept):
    kept["writer"].shutdown()


def _load(kept, turn, **where):
    """Loads with torch's classes only; returns what differs."""
    del kept
    found = states.state(turn, blank=True)
    dcp.load(found, **where)
    return states.compare(found, states.state(turn, blank=False))


def _load_with_our_reader(kept, turn, path):
    return _load(kept, turn, storage_reader=FileReader(path))


def _load_by_address(kept, turn, address):
    return _load(kept, turn, checkpoint_id=address)


def _load_downloaded(kept, turn, path):
    return _load(kept, turn, storage_reader=dcp.FileSystemReader(path))


def _download(address, file, **headers):
    return urllib.request.urlopen(urllib.request.Request(f"{address}/{file}", headers=headers), timeout=20)


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_torch_loads_from_the_address_of_a_job(tmp_path):
    with Job(2) as source, Job(3) as target:
        addresses = source.run(_publish, 0)
        assert len(set(addresses)) == 1
        address = addresses[0]
        assert target.run(_load_by_address, 1, address) == [[]] * 3
        for file in (".metadata", "__0_0.distcp", "__1_0.distcp"):
            with _download(address, file) as answer:
                (tmp_path / file).write_bytes(answer.read())
        assert target.run(_load_downloaded, 1, tmp_path) == [[]] * 3
        import fsspec

        fsspec.filesystem("http").get(f"{address}/", f"{tmp_path}/copy/", recursive=True, maxdepth=1)
        assert target.run(_load_with_our_reader, 1, tmp_path / "copy") == [[]] * 3

        for listed in (address, f"{address}/"):
            system, path = fsspec.core.url_to_fs(listed, use_listings_cache=False)
            assert system.isdir(path)
            files = {name.rpartition("/")[2] for name in system.ls(path, detail=False)}
            assert files == {".metadata", "__0_0.distcp", "__1_0.distcp"}
            assert all(system.isfile(name) for name in system.ls(path, detail=False))
        # The other rank sends those that ask it for the list to the coordinator.
        with _download(address, "__1_0.distcp") as answer:
            other = answer.url.rpartition("/")[0]
        with urllib.request.urlopen(other, timeout=20) as answer:
            assert answer.headers["Content-Type"].startswith("text/html")
            assert answer.url == f"{address}/"
        without_token = re.sub(r"(http://[^/]+)/[^/]+/", r"\1/", address)
        for refused in (without_token, f"{without_token}/", re.sub(r"dcp$", "other", address)):
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(refused, timeout=20)
        whole = (tmp_path / "__1_0.distcp").read_bytes()
        with _download(address, "__1_0.distcp", Range="bytes=1000-70000") as answer:
            assert answer.status == 206
            assert answer.url.split("/")[2] != address.split("/")[2], "the other rank serves its own"
            assert answer.read() == whole[1000:70001]
        for file in ("__2_0.distcp", "__0.metadata", "x"):
            with pytest.raises(urllib.error.HTTPError, match=f"there is no file {file} here"):
                _download(address, file)
        source.run(_end)


@pytest.mark.waits
def test_nothing_is_there_before_a_save_after_it_is_withdrawn_or_where_torch_cannot_go():
    with PeerWriterHere(timedelta(seconds=1)) as writer:
        with pytest.raises(InvalidArgument, match="nothing is published"):
            writer.folder()
        dcp.save({"x": torch.arange(5)}, storage_writer=writer)
        address = writer.folder()
        found = {"x": torch.zeros(5, dtype=torch.int64)}
        dcp.load(found, checkpoint_id=address)
        assert found["x"].tolist() == [0, 1, 2, 3, 4]
        writer.withdraw()
        with pytest.raises(InvalidArgument, match="nothing is published"):
            writer.folder()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            _download(address, "__0_0.distcp")
    for options in ({"secret": b"0123456789abcdef"}, {"tls": True}):
        with PeerWriterHere(**options) as writer:
            dcp.save({"x": torch.arange(5)}, storage_writer=writer)
            with pytest.raises(InvalidArgument, match="use a PeerReader"):
                writer.folder()


@pytest.mark.nightly
def test_fsspec_asks_for_little_more_than_is_read(monkeypatch):
    http = pytest.importorskip("fsspec.implementations.http")
    asked, real = [], http.HTTPFile.async_fetch_range

    async def counted(file, start, end):
        found = await real(file, start, end)
        asked.append(len(found))
        return found

    monkeypatch.setattr(http.HTTPFile, "_fetch_range", http.sync_wrapper(counted))
    model = {f"layer.{number}": torch.randn(100, 1000) for number in range(60)}
    model |= {"embedding": torch.randn(1900, 1000), "half": torch.zeros(9).to(torch.float8_e5m2)}
    state = {**model, **{f"optimizer.{number}": torch.randn(1 << 18) for number in range(20)}}
    with PeerWriterHere() as writer:
        dcp.save(state, storage_writer=writer, no_dist=True)
        for part in (model, state):
            found = {key: torch.empty_like(value) for key, value in part.items()}
            asked.clear()
            dcp.load(found, checkpoint_id=writer.folder(), no_dist=True)
            assert states.compare(found, part) == []
            # The rest of a file that has more than is needed, the index, and what is around tensors.
            assert sum(asked) - sum(tensor.nbytes for tensor in part.values()) < (5 << 20) + 200_000


class PeerWriterHere:
    """A writer that is shut down at the end."""

    def __init__(self, *arguments, **options):
        self._writer = PeerWriter(*arguments, interface="127.0.0.1", **options)

    def __enter__(self):
        return self._writer

    def __exit__(self, *_):
        self._writer.shutdown()


class _Twice(DefaultSavePlanner):
    """Has each item written twice, as a planner that does not leave out duplicates has two ranks write it."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return [dataclasses.replace(plan, items=plan.items * 2) for plan in plans], metadata


def test_a_key_that_two_ranks_have_written_is_refused_by_the_folder_alone():
    state = {"x": torch.arange(5), "y": 3}
    with PeerWriterHere() as writer:
        dcp.save(state, storage_writer=writer, planner=_Twice(), no_dist=True)
        address = writer.folder()
        for file in ("", ".metadata"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                _download(address, file)
            assert refused.value.code == 500
            assert "the planner has written items that its metadata does not describe" in refused.value.read().decode()
        found = {"x": torch.zeros(5, dtype=torch.int64), "y": 0}
        dcp.load(found, storage_reader=PeerReader(writer.metadata()), no_dist=True)
        assert found["x"].tolist() == [0, 1, 2, 3, 4]
        assert found["y"] == 3


def test_a_key_that_two_ranks_have_written_loads_from_files(tmp_path):
    dcp.save({"x": torch.arange(5), "y": 3}, storage_writer=FileWriter(tmp_path), planner=_Twice(), no_dist=True)
    found = {"x": torch.zeros(5, dtype=torch.int64), "y": 0}
    dcp.load(found, storage_reader=FileReader(tmp_path), no_dist=True)
    assert found["x"].tolist() == [0, 1, 2, 3, 4]
    assert found["y"] == 3
