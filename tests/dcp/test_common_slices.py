"""Ranks that need the same slices bring them to each other: which these are, and what a load does about it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from job import Job
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

from exchange import until
from listening import listening
from networked import networked
from nights import mostly_at_night
from secured import SECRET
from tensorferry.dcp import PeerReader, PeerWriter
from tensorferry.dcp.common_slices import LEAST_BYTES, MOST, PlanNote, slice_digests, with_partners
from tensorferry.dcp.index import ELEMENTS, EntryRef

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore::FutureWarning"),
    pytest.mark.beyond_torchft,
]

TIMEOUT = timedelta(seconds=60)
#: What two ranks take of 24 MiB from the source would take 8 s.
SLOW = 6 << 20


def item(fqn, offsets=(0,), lengths=(4,)):
    return SimpleNamespace(storage_index=MetadataIndex(fqn), storage_offsets=offsets, lengths=lengths)


def plan(*items, large=("w", "v", "other"), url=""):
    sizes = {name: LEAST_BYTES if name in large else 100 for name in ("w", "v", "other", "small")}
    containers = {"other": "two", "small": "three"}
    refs = {
        MetadataIndex(name): EntryRef(containers.get(name, "one"), name, "U8", size, ELEMENTS)
        for name, size in sizes.items()
    }
    return LoadPlan([], storage_data=PlanNote("d", slice_digests(LoadPlan(list(items)), refs), url))


def in_common(*plans):
    """For each rank, the containers that it needs in common with others, and the URLs of these."""
    notes = [plan.storage_data for plan in with_partners(plans)]
    return [note and {name: (own.urls, own.rank) for name, own in note.partners.items()} for note in notes]


def test_ranks_that_need_the_same_slices_of_a_container_learn_of_each_other():
    both, mine, other = (
        plan(item("w"), item("other"), url="A"),
        plan(item("w"), url="B"),
        plan(item("w", (4,)), item("other"), url="C"),
    )
    assert in_common(both, LoadPlan([]), mine, other) == [
        {"one": (("A", "B"), 0), "two": (("A", "C"), 0)},
        None,
        {"one": (("A", "B"), 1)},
        {"two": (("A", "C"), 1)},
    ]
    assert in_common(both) == [{}], "a rank alone has nothing in common"
    assert in_common(plan(item("w"), item("v")), mine) == [{}, {}], "all that is needed of a container counts"
    assert in_common(*[plan(item("small"), item("nowhere"))] * 2) == [{}, {}], "little is not worth it"
    assert in_common(*[plan(item("small"), large=("small",))] * 2)[0].keys() == {"three"}
    groups = [len(partners["one"][0]) for partners in in_common(*[mine] * (MOST + 1))]
    assert groups == [MOST // 2] * (MOST // 2) + [MOST // 2 + 1] * (MOST // 2 + 1)


def weights(seed, layers=6):
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn(1 << 20, generator=generator) for i in range(layers)}


def load(kept, metadata, options, own=(), environment=()):
    """Loads in a rank; returns whether all is right, the report and what was warned of."""
    del kept
    rank, warned, handler = torch.distributed.get_rank(), [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    expected = weights(1)
    wanted = own[rank] if own else list(expected)
    found = {name: torch.zeros_like(expected[name]) for name in wanted}
    logging.getLogger("tensorferry").addHandler(handler)
    with mock.patch.dict(os.environ, environment):
        reader = PeerReader(metadata, timeout=TIMEOUT, **networked({"same_host": False, **options}))
        before = listening()
        dcp.load(found, storage_reader=reader)
        # The server ends behind the load.
        until(lambda: listening() == before, "the server's end")
    logging.getLogger("tensorferry").removeHandler(handler)
    equal = all(torch.equal(found[name], expected[name]) for name in wanted)
    return equal, reader.report, "".join(warned)


@contextlib.contextmanager
def serving(**options):
    options = {"interface": "127.0.0.1", "same_host": False, "max_bandwidth": SLOW, **options}
    writer = PeerWriter(TIMEOUT, **networked(options))
    try:
        dcp.save(weights(1), storage_writer=writer, no_dist=True)
        yield writer
    finally:
        writer.shutdown()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("secured", mostly_at_night(["open", "secret", "tls"]))
def test_ranks_bring_each_other_what_both_need(secured):
    options = {"secret": {"secret": SECRET}, "tls": {"tls": True}, "open": {}}[secured]
    with serving(**options) as writer, Job(2) as job:
        loading = {name: value for name, value in options.items() if name == "secret"}
        before = writer._server.bytes_served
        results = job.run(load, writer.metadata(), loading)
        served = writer._server.bytes_served - before
    assert [equal for equal, *_ in results] == [True, True]
    assert sum(report["relayed"] for _, report, _ in results) > 8 << 20, results
    assert served < 40 << 20
    assert all(report["wanted"] == 24 << 20 for _, report, _ in results)


@pytest.mark.process
@pytest.mark.slow
def test_what_ranks_do_not_share_comes_from_the_source_alone():
    own = [["layer0", "layer1", "layer2"], ["layer3", "layer4", "layer5"]]
    with serving(max_bandwidth=64 << 20) as writer, Job(2) as job, socket.create_server(("127.0.0.1", 0)) as taken:
        for options, environment, needed, warns in [
            ({"relay": False}, {}, (), False),
            ({}, {"TENSORFERRY_RELAY": "0"}, (), False),
            # A server that was opened would fail to listen here, and a warning would say so.
            ({}, {"TENSORFERRY_PORT": str(taken.getsockname()[1])}, own, False),
            ({}, {"TENSORFERRY_PORT": str(taken.getsockname()[1])}, (), True),
        ]:
            for equal, report, warned in job.run(load, writer.metadata(), options, needed, environment):
                assert (equal, report["relayed"]) == (True, 0)
                assert ("brings others nothing" in warned) is warns, warned
    with serving(max_bandwidth=64 << 20, relay=False) as writer, Job(2) as job:
        assert [report["relayed"] for _, report, _ in job.run(load, writer.metadata(), {})] == [0, 0]
