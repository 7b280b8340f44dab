"""Several ranks without NumPy: what to do is said before torch fails, and a load or save without collectives works."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tensorferry.checkpointing.ranks import Ranks
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter, failures
from tensorferry.errors import InvalidArgument
from tensorferry.state import ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:torch.distributed is:UserWarning")


@pytest.fixture
def two_ranks_without_numpy(monkeypatch):
    monkeypatch.setattr(ranks, "find_spec", lambda _: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda _=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda _=None: 0)


@pytest.mark.parametrize("named", [{}, {"checkpoint_id": "elsewhere"}], ids=["", "checkpoint_id"])
def test_what_to_do_is_said_once_by_each_save_and_load_of_torch(named, tmp_path, monkeypatch, caplog):
    # torch goes its own way through writer and reader, without the collectives that would fail.
    monkeypatch.setattr(failures, "lack_numpy", lambda: True)
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.ones(3)}

    def said(act, *arguments, **options):
        caplog.clear()
        with caplog.at_level(logging.ERROR, "tensorferry"):
            act(state, *arguments, **options, **named, no_dist=True)
        return [record.getMessage() for record in caplog.records].count(ranks.WITHOUT_NUMPY)

    assert said(dcp.save, storage_writer=FileWriter(tmp_path / "c")) == 1
    assert said(dcp.load, storage_reader=FileReader(tmp_path / "c")) == 1


@pytest.mark.usefixtures("two_ranks_without_numpy")
def test_readers_and_writers_of_peers_say_it_too(caplog):
    with caplog.at_level(logging.ERROR, "tensorferry"):
        PeerWriter().set_up_storage_writer(True, rank=0, use_collectives=True)
        with pytest.raises(InvalidArgument):
            PeerReader("no metadata").read_metadata()
    assert [record.getMessage() for record in caplog.records].count(ranks.WITHOUT_NUMPY) == 2


@pytest.mark.usefixtures("two_ranks_without_numpy")
def test_checkpointers_refuse_to_save_without_it(tmp_path):
    for agree in (lambda: Ranks().new_save(1, tmp_path), lambda: Ranks().gather(1)):
        with pytest.raises(InvalidArgument, match="pip install numpy"):
            agree()
