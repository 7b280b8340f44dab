"""Megatron's sharded state in a bucket: saved, loaded, changed, spread and converted as in a folder."""

from __future__ import annotations

import os

import pytest
from placed import RELEASES, Placement, digest, expected, perform, sharded_state

from stores import BUCKET, FORBIDDEN, Gateway, client, environment, moto, objects

pytestmark = pytest.mark.process


PLACE = (2, 1, 1)


@pytest.fixture(scope="module")
def address():
    with moto() as url:
        yield url


@pytest.fixture
def newest(host):
    """The host of one release, for what no release changes."""
    if host.release != RELEASES[-1]:
        pytest.skip("one release is enough")
    return host


def save(kept, variables, url, value=0, sizes=PLACE):
    import tensorferry.megatron as ours

    os.environ.update(variables)
    kept[sizes] = Placement(*sizes)
    try:
        ours.save(sharded_state(kept[sizes], value=value), url, content_metadata={"by": value})
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return None


def load(kept, variables, url, value=0, sizes=(1, 1, 2)):
    import tensorferry.megatron as ours

    del kept
    os.environ.update(variables)
    place = Placement(*sizes)
    try:
        found = ours.load(sharded_state(place, empty=True), url)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    assert ours.load_content_metadata(url) == {"by": value}
    found.pop("content_metadata")
    assert digest(found) == expected(place, value=value)
    return None


def test_a_checkpoint_in_a_bucket_is_one_in_a_folder(host, address, tmp_path):
    variables, prefix = environment(address), f"same-{host.release}"
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


def test_a_save_in_a_forked_process_is_refused_and_the_checkpoint_before_stays(newest, address):
    ranks, variables = newest.job(2), environment(address)
    assert ranks.run(save, variables, f"s3://{BUCKET}/background", 1) == [None, None]
    for told, loaded in ranks.run(save_in_background, variables, f"s3://{BUCKET}/background"):
        assert "ForkedProcess: requests to object stores were made before fork()" in told
        assert loaded is None


def save_twice_at_once(kept, variables, url):
    import tensorferry.megatron as ours

    os.environ.update(variables)
    kept["all"] = Placement(1, 1, 1)
    requests = []
    for value in (1, 2):
        state = sharded_state(kept["all"], value=value)
        requests.append(ours.save(state, url, async_sharded_save=True, content_metadata={"by": value}))
        arguments = list(requests[-1].async_fn_args)
        arguments[1] = requests[-1].preload_fn()
        requests[-1].async_fn(*arguments)
    told = []
    for value, request in enumerate(requests, 1):
        for function in request.finalize_fns:
            function()
        told.append(load(kept, variables, url, value, (1, 1, 1)))
    return told


def test_a_commit_spares_what_another_save_has_written_and_not_committed(newest, address):
    assert newest.job(1).run(save_twice_at_once, environment(address), f"s3://{BUCKET}/two") == [[None, None]]
    assert len([key for key in objects(address, "two/") if "/rank" in key]) == 1


def change(kept, variables, url):
    import tensorferry.megatron as ours

    del kept
    os.environ.update(variables)
    known = {*ours.load_sharded_metadata(url)}
    assert {"layers.column", "layers.extra/shard_0_4", "optimizer.flat"} <= known
    ours.remove_sharded_tensors(url, "layers.")
    left = ours.load_tensors_metadata(url)
    assert not [key for key in left if key.startswith("layers.")]
    flat = ours.load_plain_tensors(url)["optimizer.flat"]
    assert flat.tolist() == [(number + 3) % 251 for number in range(31 * 17)]
    assert ours.load_common_state_dict(url)["iteration"] == 100


def restore(kept, variables, url):
    import tensorferry.megatron as ours

    del kept
    os.environ.update(variables)
    ours.restore_common(url)


def test_what_else_a_checkpoint_in_a_bucket_can_be_asked(newest, address):
    variables, url = environment(address), f"s3://{BUCKET}/asked"
    assert newest.job(1).run(save, variables, url, 0, (1, 1, 1)) == [None]
    newest.job(1).run(change, variables, url)
    held = objects(address, "asked/")
    client(address).put_object(Bucket=BUCKET, Key="asked/common.pt", Body=b"of a save that was killed")
    client(address).delete_object(Bucket=BUCKET, Key="asked/metadata.json")
    newest.job(1).run(restore, variables, url)
    assert objects(address, "asked/") == held


def test_every_rank_raises_what_a_store_says(newest, address, tmp_path):
    variables, url = environment(address), f"s3://{BUCKET}/refused"
    ranks = newest.job(2)
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
        converted = newest.job(1).run(convert, environment(between.url), url, str(tmp_path / "new"), "tensorferry")
        for told in ranks.run(load, environment(between.url), url, 1) + converted:
            assert told.startswith("CheckpointingException")
            assert "the store does not permit it" in told
            assert "restore_common" not in told
    # The first save stays, with its common state, which was replaced before the index was refused.
    assert ranks.run(load, variables, url, 1) == [None, None]


def load_once(kept, variables, url):
    import tensorferry.megatron as ours

    os.environ.update(variables)
    place = Placement(1, 1, 2)
    group = kept.setdefault("all", place.group())
    strategy = ours.TwoStageDataParallelLoadShardedStrategy(group, interface="127.0.0.1")
    found = ours.load(sharded_state(place, empty=True), url, strategy)
    found.pop("content_metadata")
    assert digest(found) == expected(place, value=3)
    return strategy.report


def test_ranks_read_from_a_bucket_once_what_several_of_them_need(newest, address):
    variables, url = environment(address), f"s3://{BUCKET}/once"
    ranks = newest.job(2)
    assert ranks.run(save, variables, url, 3) == [None, None]
    alone = sum(len(data) for key, data in objects(address, "once/").items() if "/rank" in key)
    told = ranks.run(load_once, variables, url)
    assert sum(report["wanted"] for report in told) < alone
    assert all(report["fetched"] > 0 for report in told)


def convert(kept, variables, source, output, to):
    from tensorferry.megatron.convert import convert

    del kept
    os.environ.update(variables)
    try:
        return tuple(convert(source, output, to=to, window=1 << 20))
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def test_the_converter_reads_and_writes_in_a_bucket(newest, address, tmp_path):
    variables, place = environment(address), f"s3://{BUCKET}/formats"
    assert newest.job(2).run(save, variables, f"{place}/first", 5) == [None, None]
    steps = [
        (f"{place}/first", f"{place}/second", "torch_dist"),
        (f"{place}/second", f"{place}/third", "tensorferry"),
        (f"{place}/third", str(tmp_path / "fourth"), "tensorferry"),
    ]
    for step in steps:
        (done,) = newest.job(1).run(convert, variables, *step)
        assert isinstance(done, tuple), done
    for found in (f"{place}/third", str(tmp_path / "fourth")):
        assert newest.job(2).run(load, variables, found, 5) == [None, None]
    assert {key.rpartition("/")[2] for key in objects(address, "formats/second/")} >= {".metadata", "metadata.json"}
    held = objects(address, "formats/")
    (told,) = newest.job(1).run(convert, variables, *steps[0])
    assert told.startswith("CheckpointingException")
    assert "something is there already" in told
    client(address).put_object(Bucket=BUCKET, Key="formats/second/a/.zarray", Body=b"")
    (told,) = newest.job(1).run(convert, variables, f"{place}/second", f"{place}/fifth", "tensorferry")
    assert "copy it to a folder" in told
    client(address).delete_object(Bucket=BUCKET, Key="formats/second/a/.zarray")
    assert objects(address, "formats/") == held


def with_megatrons_own(kept, variables, url):
    import megatron.core.dist_checkpointing as stock

    import tensorferry.megatron as ours

    del kept
    os.environ.update(variables)
    told = []
    for call in (
        lambda: stock.save(sharded_state(Placement(1, 1, 1)), url, ours.save_strategy()),
        lambda: stock.load(sharded_state(Placement(1, 1, 1)), url, ours.load_strategy()),
    ):
        try:
            told.append(call())
        except Exception as e:
            told.append(f"{type(e).__name__}: {e}")
    return told


def test_megatrons_own_functions_look_for_a_folder_first(host, address, tmp_path, monkeypatch):
    """They come to no strategy; the guide says so."""
    monkeypatch.chdir(tmp_path)
    ((saved, loaded),) = host.job(1).run(with_megatrons_own, environment(address), f"s3://{BUCKET}/theirs")
    assert saved.startswith("FileNotFoundError")
    assert loaded == f"CheckpointingException: Checkpoint directory s3://{BUCKET}/theirs does not exist"
    assert not objects(address, "theirs/")
