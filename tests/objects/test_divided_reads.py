"""Ranks of a load that need the same slices of an object read a part each, and give it to the others."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from listening import listening
from stores import Gateway, environment
from tensorferry.dcp import FileReader, FileWriter, own_errors

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.slow, pytest.mark.process]

MIB = 1 << 20


def weights():
    generator = torch.Generator().manual_seed(3)
    return {f"layer{i}": torch.randn(MIB, generator=generator) for i in range(6)}


class Rank:
    """A rank of a job that loads."""

    def __init__(self, rank, world):
        del world
        self.rank = rank

    def load(self, variables, place):
        """Returns whether all is right, and what was read."""
        os.environ.update(variables)
        expected = weights()
        found = {name: torch.zeros_like(one) for name, one in expected.items()}
        reader = FileReader(place)
        with own_errors():
            dcp.load(found, storage_reader=reader)
        return all(torch.equal(found[name], one) for name, one in expected.items()), reader.report

    def load_that_fails(self, variables, place):
        """Returns whether something listens after a load that failed while it was planned, and then a while later."""
        os.environ.update(variables)

        class Planner(dcp.DefaultLoadPlanner):
            def create_global_plan(self, _):
                raise ValueError("no plan")

        reader, before = FileReader(place, timeout=timedelta(seconds=4)), listening()
        with pytest.raises(CheckpointException):
            dcp.load(
                {name: torch.zeros_like(one) for name, one in weights().items()},
                storage_reader=reader,
                planner=Planner(),
            )
        at_once, end = listening() - before, time.monotonic() + 30
        while listening() - before and time.monotonic() < end:
            time.sleep(0.1)
        return bool(at_once), bool(listening() - before)

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
    gateway, _ = counted
    with job_of(2) as job:
        assert job("load_that_fails", environment(gateway.url), server.place) == [(True, False)] * 2
