"""Several ranks without NumPy: what to do is said before torch fails, and a load or save without collectives works."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tensorferry.checkpointing.ranks import Ranks
from tensorferry.dcp import FileReader, FileWriter, PeerWriter
from tensorferry.errors import InvalidArgument
from tensorferry.state import ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:torch.distributed is:UserWarning")


@pytest.fixture
def two_ranks_without_numpy(monkeypatch):
    monkeypatch.setattr(ranks, "find_spec", lambda _: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda _=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda _=None: 0)


@pytest.mark.usefixtures("two_ranks_without_numpy")
def test_what_to_do_is_said_before_torch_begins(tmp_path, caplog):
    with caplog.at_level(logging.ERROR, "tensorferry"):
        for number, one in enumerate((FileWriter(tmp_path), FileReader(tmp_path), PeerWriter()), 1):
            one.reset(tmp_path)
            assert [record.getMessage() for record in caplog.records].count(ranks.WITHOUT_NUMPY) == number


@pytest.mark.usefixtures("two_ranks_without_numpy")
def test_checkpointers_refuse_to_save_without_it(tmp_path):
    for agree in (lambda: Ranks().new_save(1, tmp_path), lambda: Ranks().gather(1)):
        with pytest.raises(InvalidArgument, match="pip install numpy"):
            agree()
    assert Ranks(0, 2, agree=lambda value: value).new_save(1, tmp_path).rank == 0


def test_one_rank_needs_none(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(ranks, "find_spec", lambda _: None)
    dcp.save({"w": torch.ones(3)}, storage_writer=FileWriter(tmp_path))
    assert ranks.WITHOUT_NUMPY not in caplog.text
