"""A running job publishes its state, and jobs with other placements load it without a file."""

from __future__ import annotations

import contextlib
import re
from datetime import timedelta

import pytest
import torch
from placed import Placement, digest, expected, sharded_state

from tensorferry.errors import InvalidArgument

pytestmark = pytest.mark.process


TIMEOUT = timedelta(seconds=30)


def publish(kept, sizes, through_megatron, folder):
    import megatron.core.dist_checkpointing as stock

    import tensorferry.megatron as ours
    from tensorferry.dcp import PeerWriter

    kept["writer"] = writer = PeerWriter(TIMEOUT, interface="127.0.0.1")
    # Borrowed: it lives as long as the publication.
    kept["state"] = state = sharded_state(Placement(*sizes), value=5, gap=True)
    if through_megatron:
        stock.save(state, folder, ours.save_strategy(peers=writer))
        return writer.metadata()
    return ours.publish(state, writer)


def load(kept, sizes, metadata, through, folder):
    import megatron.core.dist_checkpointing as stock

    import tensorferry.megatron as ours

    place = Placement(*sizes)
    state = sharded_state(place, empty=True)
    strategy = ours.load_strategy(peers=metadata, timeout=TIMEOUT)
    if through == "megatron":
        if torch.distributed.get_rank() == 0:
            strategy.make_folder(folder)
        torch.distributed.barrier()
        found = stock.load(state, folder, strategy)
    elif through == "two-stage":
        group = kept.setdefault(sizes, place.group())
        strategy = ours.TwoStageDataParallelLoadShardedStrategy(
            group, peers=metadata, timeout=TIMEOUT, interface="127.0.0.1"
        )
        found = ours.load(state, sharded_strategy=strategy)
    else:
        found = ours.load(state, sharded_strategy=strategy, strict="raise_all")
    return digest(found), expected(place, value=5)


def close(kept):
    kept.pop("writer").shutdown()
    kept.clear()


def test_a_job_loads_what_another_one_publishes(host, tmp_path):
    for number, through in enumerate(("ours", "megatron", "two-stage")):
        before, after = (((2, 1, 1), (1, 1, 4)), ((1, 1, 2), (2, 2, 1)), ((1, 2, 1), (1, 2, 2)))[number]
        folder = tmp_path / through
        (folder / "of the source").mkdir(parents=True)
        strings = host.job(2).run(publish, before, through == "megatron", str(folder / "of the source"))
        assert len(set(strings)) == 1
        for found, wanted in host.job(4).run(load, after, strings[0], through, str(folder)):
            assert found == wanted
        assert not list(folder.glob("*.safetensors"))
        host.job(2).run(close)


def load_gone(kept, metadata):
    from test_errors import outcome

    import tensorferry.megatron as ours

    del kept
    strategy = ours.load_strategy(peers=metadata, timeout=timedelta(seconds=2))
    return outcome(lambda: ours.load(sharded_state(Placement(1, 1, 2), empty=True), sharded_strategy=strategy))


def test_a_source_that_is_gone_is_an_error_on_every_rank(host, tmp_path):
    (metadata, _) = host.job(2).run(publish, (2, 1, 1), False, str(tmp_path))
    host.job(2).run(close)
    for text in host.job(2).run(load_gone, metadata):
        assert text.startswith("cannot load from the running job")


def publish_in_part(kept, victim):
    from unittest import mock

    from test_errors import outcome

    import tensorferry.megatron as ours
    from tensorferry.dcp import PeerWriter
    from tensorferry.storage.container import Container

    writer = PeerWriter(TIMEOUT, interface="127.0.0.1")
    kept["state"] = state = sharded_state(Placement(1, 1, 2), value=5)
    with contextlib.ExitStack() as stack:
        if torch.distributed.get_rank() == victim:
            stack.enter_context(mock.patch.object(Container, "publish", side_effect=MemoryError("no room")))
        text = outcome(lambda: ours.publish(state, writer))
    try:
        writer.metadata()
        published = True
    except InvalidArgument:
        published = False
    kept["writer"] = writer
    return text, published, ours.publish(state, writer)


def test_a_rank_that_cannot_publish_its_part_is_an_error_on_every_rank(host):
    for victim in (0, 1):
        told = host.job(2).run(publish_in_part, victim)
        for text, published, _ in told:
            assert re.match(rf"cannot .*MemoryError: no room.*\(rank {victim}\)", text)
            assert not published
        for found, wanted in host.job(4).run(load, (1, 1, 4), told[0][2], "ours", ""):
            assert found == wanted
        host.job(2).run(close)
