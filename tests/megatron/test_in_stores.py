"""Megatron's sharded state in a bucket: saved, loaded and shared as in a folder."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from placed import Placement, digest, expected, perform, sharded_state

from stores import BUCKET, FORBIDDEN, Gateway, environment, moto, objects

pytestmark = pytest.mark.process


PLACE = (2, 1, 1)


@pytest.fixture(scope="module")
def address():
    with moto() as url:
        yield url


def save(kept, variables, url, value=0, sizes=PLACE):
    import tensorferry.megatron as ours

    os.environ.update(variables)
    kept[sizes] = Placement(*sizes)
    try:
        ours.save(sharded_state(kept[sizes], value=value), url, content_metadata={"by": value})
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return None


def load(kept, variables, url, value=0, sizes=(1, 1, 2), is_shared=False):
    """Returns an error; or, if ranks read for each other, what they have read."""
    import tensorferry.megatron as ours

    os.environ.update(variables)
    place, strategy = Placement(*sizes), None
    if is_shared:
        group = kept.setdefault("all", place.group())
        strategy = ours.TwoStageDataParallelLoadShardedStrategy(group, interface="127.0.0.1")
    try:
        # The state is small.
        with mock.patch("tensorferry.storage.divided.LEAST_BYTES", 1):
            found = ours.load(sharded_state(place, empty=True), url, strategy)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    assert ours.load_content_metadata(url) == {"by": value}
    found.pop("content_metadata")
    assert digest(found) == expected(place, value=value)
    return strategy.report if is_shared else None


def test_a_checkpoint_in_a_bucket_is_one_in_a_folder(host, address, tmp_path):
    variables, prefix = environment(address), "same"
    ranks = host.job(2)
    for value in (0, 7):
        assert ranks.run(save, variables, f"s3://{BUCKET}/{prefix}", value) == [None, None]
        assert ranks.run(load, variables, f"s3://{BUCKET}/{prefix}", value) == [None, None]
    held = {key.rpartition("/")[2]: data for key, data in objects(address, prefix).items()}
    assert sorted(name.partition("-")[0] for name in held) == [
        *(".metadata", "common.pt", "index.safetensors", "metadata.json", "rank00000", "rank00001")
    ]
    for name, data in held.items():
        (tmp_path / name).write_bytes(data)
    assert ranks.run(load, variables, str(tmp_path), 7) == [None, None]


def save_in_background(kept, variables, url):
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    import tensorferry.megatron as ours

    os.environ.update(variables)
    place = Placement(1, 1, 2)
    state = sharded_state(place, value=7)
    keep = state["scalar"].data
    strategy = FullyParallelSaveStrategyWrapper(ours.save_strategy(), kept.setdefault("all", place.group()))
    request = ours.save(state, url, strategy, async_sharded_save=True, content_metadata={"by": 7})
    try:
        perform(request, keep)
    except Exception as e:
        return f"{type(e).__name__}: {e}", load(kept, variables, url, 1)
    return None


def test_a_save_in_a_forked_process_is_refused_and_the_checkpoint_before_stays(host, address):
    ranks, variables = host.job(2), environment(address)
    assert ranks.run(save, variables, f"s3://{BUCKET}/background", 1) == [None, None]
    for told, loaded in ranks.run(save_in_background, variables, f"s3://{BUCKET}/background"):
        assert "ForkedProcess: requests to object stores were made before fork()" in told
        assert loaded is None


def test_every_rank_raises_what_a_store_says(host, address):
    variables, url = environment(address), f"s3://{BUCKET}/refused"
    ranks = host.job(2)
    for told in ranks.run(load, variables, url):
        assert told.startswith("CheckpointingException")
        assert "refused is not a distributed checkpoint: it has no metadata.json" in told
    assert ranks.run(save, variables, url, 1) == [None, None]
    with Gateway(address) as between:
        for part in ("/rank00001", "/index.safetensors"):
            between.act = lambda _, method, path, part=part: FORBIDDEN if method == "PUT" and part in path else None
            for told in ranks.run(save, environment(between.url), url, 2):
                assert told.startswith("CheckpointingException")
                assert part in told
                assert "the store does not permit it" in told
        between.act = lambda _, __, path: FORBIDDEN if "metadata.json" in path else None
        for told in ranks.run(load, environment(between.url), url, 1):
            assert told.startswith("CheckpointingException")
            assert "the store does not permit it" in told
            assert "restore_common" not in told
    # The first save stays, with its common state, which was replaced before the index was refused.
    assert ranks.run(load, variables, url, 1) == [None, None]


def test_ranks_read_from_a_bucket_once_what_several_of_them_need(host, address):
    variables, url = environment(address), f"s3://{BUCKET}/once"
    ranks = host.job(2)
    assert ranks.run(save, variables, url, 3) == [None, None]
    for report in ranks.run(load, variables, url, 3, (1, 1, 2), True):
        assert report["relayed"] > 0
