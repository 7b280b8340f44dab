"""Ranks that need the same slices bring them to each other: which these are, and what a load does about it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from job import Job
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

from exchange import until
from listening import listening
from nights import mostly_at_night
from secured import SECRET
from tensorferry.dcp import PeerReader, PeerWriter
from tensorferry.dcp.common_slices import LEAST_BYTES, Common, Needs, in_common, needs
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


def told(*items, large=("w", "v", "other")):
    sizes = {name: LEAST_BYTES if name in large else 100 for name in ("w", "v", "other", "small")}
    containers = {"other": "two", "small": "three"}
    refs = {
        MetadataIndex(name): EntryRef(containers.get(name, "one"), name, "U8", size, ELEMENTS)
        for name, size in sizes.items()
    }
    return needs(LoadPlan(list(items)), refs)


def test_containers_of_which_ranks_need_the_same_are_in_common():
    both, mine, theirs = told(item("w"), item("other")), told(item("w")), told(item("w", (4,)), item("other"))
    assert in_common([both, mine, theirs]) == [
        Common(frozenset({"one", "two"})),
        Common(frozenset({"one"})),
        Common(frozenset({"two"})),
    ]
    assert in_common([both]) == [Common(frozenset())], "a rank alone has nothing in common"
    assert told(item("w"), item("v")) != told(item("w")), "all that is needed of a container counts"


def test_little_is_not_worth_it_and_what_does_not_exist_is_left_to_the_read():
    assert told(item("small"), item("nowhere")) == Needs({})
    assert told(item("small"), large=("small",)).digests.keys() == {"three"}


def test_a_rank_that_tells_nothing_has_nothing_in_common():
    mine = told(item("w"))
    assert in_common([mine, None]) == [Common(frozenset())] * 2
    assert in_common([mine, None, mine])[1] == Common(frozenset())


def weights(seed, layers=6):
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn(1 << 20, generator=generator) for i in range(layers)}


def load(kept, metadata, options, own=(), environment=()):
    """Loads in a rank; returns the report and whether all is right."""
    del kept
    os.environ.update(environment)
    rank = torch.distributed.get_rank()
    expected = weights(1)
    wanted = own[rank] if own else list(expected)
    found = {name: torch.zeros_like(expected[name]) for name in wanted}
    reader, before = PeerReader(metadata, timeout=TIMEOUT, same_host=False, **options), listening()
    dcp.load(found, storage_reader=reader)
    # The server ends behind the load.
    until(lambda: listening() == before, "the server's end")
    equal = all(torch.equal(found[name], expected[name]) for name in wanted)
    return equal, reader.report


@contextlib.contextmanager
def serving(**options):
    writer = PeerWriter(TIMEOUT, interface="127.0.0.1", same_host=False, **{"max_bandwidth": SLOW, **options})
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
    assert [equal for equal, _ in results] == [True, True]
    relayed = sum(report["relayed"] for _, report in results)
    assert relayed > 8 << 20, results
    assert served < 40 << 20
    assert all(report["wanted"] == 24 << 20 for _, report in results)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("side", mostly_at_night(["source", "readers", "environment", "one reader"]))
def test_nothing_is_relayed_where_one_side_does_not_want_it(side):
    with serving(max_bandwidth=64 << 20, relay=side != "source") as writer, Job(2) as job:
        options = {"relay": False} if side == "readers" else {}
        environment = {"TENSORFERRY_RELAY": "0"} if side == "environment" else {}
        if side == "one reader":
            options = {}
            results = job.run(load_unless_first, writer.metadata())
        else:
            results = job.run(load, writer.metadata(), options, (), environment)
    assert [(equal, report["relayed"]) for equal, report in results] == [(True, 0)] * 2


def load_unless_first(kept, metadata):
    return load(kept, metadata, {"relay": torch.distributed.get_rank() > 0})


@pytest.mark.process
@pytest.mark.slow
def test_ranks_that_need_other_tensors_relay_nothing_and_open_no_port():
    own = [["layer0", "layer1", "layer2"], ["layer3", "layer4", "layer5"]]
    with serving(max_bandwidth=64 << 20) as writer, Job(2) as job, socket.create_server(("127.0.0.1", 0)) as taken:
        # A server that was opened would fail to listen here, and a warning would say so.
        environment = {"TENSORFERRY_PORT": str(taken.getsockname()[1])}
        results = job.run(load_warned, writer.metadata(), own, environment)
        assert [(equal, report["relayed"], warned) for (equal, report), warned in results] == [(True, 0, [])] * 2
        # Without a port, each takes all from the source.
        results = job.run(load_warned, writer.metadata(), (), environment)
        assert [(equal, report["relayed"]) for (equal, report), _ in results] == [(True, 0)] * 2
        assert all("brings others nothing" in warned[0] for _, warned in results), results
        # Nor with a variable of servers that is wrong.
        results = job.run(load_warned, writer.metadata(), (), {"TENSORFERRY_METRICS_PORT": "x"})
    assert [(equal, report["relayed"]) for (equal, report), _ in results] == [(True, 0)] * 2
    assert all("brings others nothing" in warned[0] for _, warned in results), results


def load_warned(kept, metadata, own, environment):
    warned = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("tensorferry").addHandler(handler)
    try:
        return load(kept, metadata, {}, own, environment), warned
    finally:
        logging.getLogger("tensorferry").removeHandler(handler)
        for name in environment:
            del os.environ[name]


def test_a_load_without_a_process_group_opens_no_server(monkeypatch):
    opened = []
    monkeypatch.setattr("tensorferry.dcp.peer_reader.relaying", lambda *given: opened.append(given))
    with serving(max_bandwidth=None) as writer:
        found = {"layer0": torch.zeros(1 << 20)}
        reader = PeerReader(writer.metadata(), timeout=TIMEOUT)
        dcp.load(found, storage_reader=reader, no_dist=True)
        dcp.load(weights(2), storage_reader=reader)
    assert opened == []
    assert reader.report["relayed"] == 0
