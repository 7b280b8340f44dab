"""Ranks of a load that need the same slices of an object read a part each, and give it to the others."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from exchange import until
from listening import listening
from stores import Gateway, environment
from tensorferry.dcp import FileReader, FileWriter, own_errors

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.slow, pytest.mark.process]

MIB = 1 << 20


def weights():
    generator = torch.Generator().manual_seed(3)
    return {f"layer{i}": torch.randn(MIB, generator=generator) for i in range(6)}


class Unplanned(dcp.DefaultLoadPlanner):
    def create_global_plan(self, _):
        raise ValueError("no plan")


class Rank:
    """A rank of a job that loads."""

    def __init__(self, rank, world):
        del world
        self.rank = rank

    def load(self, variables, place, planner=None):
        """Returns whether all is right, and what was read; or whether the load failed when the server was there."""
        os.environ.update(variables)
        expected = weights()
        found = {name: torch.zeros_like(one) for name, one in expected.items()}
        reader, before = FileReader(place, timeout=timedelta(seconds=4 if planner else 60)), listening()
        with own_errors(), pytest.raises(CheckpointException) if planner else contextlib.nullcontext():
            dcp.load(found, storage_reader=reader, planner=planner)
        was_there = listening() != before
        # It ends behind the load.
        until(lambda: listening() == before, "the server's end")
        return was_there if planner else all(map(torch.equal, found.values(), expected.values())), reader.report

    def end(self):
        pass


def job_of(world):
    return ranks.Job("the job", world, Rank, 90)


@pytest.fixture
def counted(server):
    """A checkpoint of 24 MiB, and a gateway that counts the bytes of answers."""
    dcp.save(weights(), storage_writer=FileWriter(server.place), no_dist=True)
    sent = []

    def act(_, method, path):
        def note(data):
            sent.append(len(data))
            return data

        return note if method == "GET" and "/rank" in path else None

    with Gateway(server.url, act) as gateway:
        yield gateway, sent


def test_the_store_sends_once_what_all_need(counted, server):
    (gateway, sent), world = counted, 3
    with job_of(world) as job:
        results = job("load", environment(gateway.url), server.place)
    assert all(equal for equal, _ in results), results
    assert sum(sent) < 1.1 * (24 << 20), results
    for _, report in results:
        assert report["wanted"] == 24 << 20
        assert report["relayed"] >= (24 << 20) * (world - 1) // world
        assert report["bytes"] < 1.1 * (24 << 20) / world


def test_of_a_load_that_failed_elsewhere_no_server_stays(counted, server):
    with job_of(2) as job:
        results = job("load", environment(counted[0].url), server.place, Unplanned())
    assert [was_there for was_there, _ in results] == [True, True]
