"""Checkpoints of backend zarr: those that megatron-core 0.15 wrote and can read, damaged ones, and what is saved."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import zarr_states
from test_errors import outcome
from zarr_states import DTYPES, WRITTEN, differences, expected, rank_and_world, sharded_state

pytestmark = pytest.mark.process


@pytest.fixture
def folder(tmp_path):
    """A copy of what release 0.15 wrote."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))


def without_random(state):
    """Objects cannot be resharded."""
    del state["objects"]["random"]
    return state


def load_all(kept, folder, vocabulary, same_world):
    """Loads with each strategy; returns what differs from what it should be."""
    from megatron.core import dist_checkpointing as stock

    from tensorferry.megatron import TensorStoreLoadShardedStrategy, ZarrLoadShardedStrategy

    del kept
    rank, world = rank_and_world()
    keep = (lambda state: state) if same_world else without_random
    found = []
    for strategy in (
        ZarrLoadShardedStrategy(),
        TensorStoreLoadShardedStrategy(load_directly_on_device=True),
        None if hasattr(stock.serialization, "get_default_strategy") else TensorStoreLoadShardedStrategy(),
    ):
        state = keep(sharded_state(rank, world, lambda part: torch.full_like(part, 1), vocabulary))
        data = state["rows"].data
        loaded = stock.load(state, folder, strategy)
        assert loaded["rows"].data_ptr() == data.data_ptr()
        found += differences(loaded, keep(expected(rank, world, vocabulary)))
    return found


@pytest.mark.parametrize(("world", "vocabulary"), [(2, 10), (2, 12), (1, 8)])
def test_what_release_0_15_wrote_is_read(each_host, world, vocabulary):
    assert each_host.job(world).run(load_all, str(WRITTEN), vocabulary, world == 2) == [[]] * world


def describe(kept, folder):
    from megatron.core import dist_checkpointing as stock

    from tensorferry.megatron import ZarrLoadShardedStrategy

    del kept
    rank, world = rank_and_world()
    tensors = stock.load_tensors_metadata(folder, ZarrLoadShardedStrategy())
    everything = ZarrLoadShardedStrategy().load_sharded_metadata(folder)
    state = sharded_state(rank, world)
    state["new"] = sharded_state(rank, world)["rows"]
    state["new"].key = "new"
    del state["columns"]
    _, missing, unexpected = stock.load(state, folder, ZarrLoadShardedStrategy(), strict="return_all")
    return (
        {key: (one.global_shape, one.dtype, one.data) for key, one in tensors.items()},
        sorted(everything),
        missing,
        unexpected,
    )


def test_its_metadata_is_read(ranks, folder):
    """Also as early releases wrote it: without the last number in an object's name, and beside a writer's locks."""
    objects = {"random/shard_0_2", "random/shard_1_2", "layers.extra_state/shard_0.0_1.1"}
    wanted = {key: (shape, torch.float32, None) for key, shape in zarr_states.SHARDED.items()}
    wanted |= {"columns": ((6, 8), torch.bfloat16, None), "vocabulary": ((10, 4), torch.float32, None)}
    wanted |= {f"dtypes.{name}": ((3, 7), getattr(torch, name), None) for name in DTYPES}
    for _ in range(2):
        for tensors, keys, missing, unexpected in ranks.run(describe, str(folder)):
            assert tensors == wanted
            assert set(keys) == objects | wanted.keys()
            assert (missing, unexpected) == ({"columns"}, {"new"})
        extra = folder / "layers.extra_state" / "shard_0.0_1.1.pt"
        if extra.exists():
            extra.rename(extra.with_name("shard_0.0_1.pt"))
            (folder / "rows.sync").mkdir()
            (folder / "rows.sync" / ".zarray").touch()
    assert ranks.run(load_all, str(folder), 10, True) == [[], []]


def try_load(kept, folder, change=None, options=None):
    """Loads all; returns the class and text of the error, and how many tensors were written to."""
    from tensorferry.megatron import ZarrLoadShardedStrategy
    from tensorferry.megatron.shards import leaves

    del kept
    state = sharded_state(*rank_and_world(), torch.zeros_like, 10)
    del state["iteration"], state["names"]
    name, value = change or (None, None)
    if name == "key":
        state["rows"].key = value
    elif name == "rows":
        state["rows"].global_shape = (value, 5)
    elif name == "data":
        state["rows"].data = state["rows"].data[:, :1].expand(-1, value)
    elif name == "object":
        state["objects"]["random"].key = value
    try:
        ZarrLoadShardedStrategy(**(options or {})).load(state, folder)
    except Exception as e:
        touched = sum(int(leaf.data.bool().any()) for _, leaf in leaves(state) if isinstance(leaf.data, torch.Tensor))
        return type(e).__name__, str(e), touched
    return None


def rewrite(path, **fields):
    (path / ".zarray").write_text(json.dumps(json.loads((path / ".zarray").read_text()) | fields))


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def become_pipe(path):
    path.unlink()
    os.mkfifo(path)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/tensorferry-should-not-be-there",)


def bomb(path):
    rewrite(path, compressor={"id": "gzip", "level": 1})
    for number in (0, 1):
        (path / f"{number}.0").write_bytes(gzip.compress(bytes(10 << 20)))


#: Found before anything is overwritten.
BAD = {
    "chunk gone": (lambda f: (f / "rows/1.0").unlink(), "rows is incomplete: a chunk of"),
    "chunk is a pipe": (lambda f: become_pipe(f / "rows/1.0"), "is not a regular file"),
    "array gone": (lambda f: shutil.rmtree(f / "rows"), "the checkpoint has no tensor 'rows'"),
    "array deep": (lambda f: (f / "rows/.zarray").write_text("[" * 100000), "is not an array that Megatron wrote"),
    "shape another": (lambda f: rewrite(f / "rows", shape=[9, 5]), "Global shape mismatch for loaded ((9, 5))"),
    "dtype": (lambda f: rewrite(f / "rows", dtype="<u4"), "is of uint32, which Megatron did not save"),
    "filter that unpickles": (lambda f: rewrite(f / "rows", filters=[{"id": "pickle"}]), "is not an array"),
    "compressor that unpickles": (lambda f: rewrite(f / "rows", compressor={"id": "pickle"}), "is not an array"),
    "object gone": (lambda f: (f / "random/shard_1_2.pt").unlink(), "Object shard"),
    "object evil": (lambda f: torch.save(Evil(), f / "random/shard_1_2.pt"), "not on the allow-list"),
    "no metadata.json": (lambda f: (f / "metadata.json").unlink(), "it has no metadata.json"),
    "another backend": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "torch_dist"}'),
        "is of backend 'torch_dist'",
    ),
    "a newer version": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 2}'),
        "has version 2 of the format",
    ),
}
#: Found while it is read.
DAMAGED = {
    "chunk short": (lambda f: shorten(f / "rows/1.0"), "rows is damaged"),
    "compressed bomb": (lambda f: bomb(f / "rows"), "rows is damaged"),
}
BAD_REQUESTS = {
    ("key", "../outside"): "it leads out of",
    ("key", "/etc"): "it leads out of",
    ("object", "../random"): "it leads out of",
    ("rows", 16): "Global shape mismatch",
    ("data", 5): "rows: its data cannot be written to",
}


def test_bad_folders_and_requests_are_refused_on_every_rank(ranks, tmp_path):
    for name, (damage, text) in (BAD | DAMAGED).items():
        folder = Path(shutil.copytree(WRITTEN, tmp_path / name))
        damage(folder)
        for kind, message, touched in ranks.run(try_load, str(folder)):
            assert kind == "CheckpointingException", name
            assert text in message, name
            assert not touched or name in DAMAGED, name
    assert not Path("/tmp/tensorferry-should-not-be-there").exists()
    shutil.copytree(WRITTEN / "rows", tmp_path / "outside")
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "requests"))
    for change, text in BAD_REQUESTS.items():
        for kind, message, touched in ranks.run(try_load, str(folder), change):
            assert (kind, touched) == ("CheckpointingException", 0), change
            assert text in message, change


def test_trusted_pickles_are_read(ranks, folder):
    """What a user may allow; the class is one that the ranks know."""
    torch.save(zarr_states.differences, folder / "random/shard_1_2.pt")
    refused = ranks.run(try_load, str(folder))
    assert all("zarr_states.differences" in message for _, message, _ in refused)
    assert ranks.run(try_load, str(folder), None, {"safe_globals": [zarr_states.differences]}) == [None, None]


def save(kept, folder):
    from megatron.core import dist_checkpointing as stock
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from tensorferry.megatron import ZarrSaveShardedStrategy

    del kept
    rank, world = rank_and_world()
    start, end = ((0, 3), (3, 8))[rank]
    # Uneven, so that both ranks write to one chunk; and strided: its elements are not in the order of a chunk's.
    data = torch.arange(80).reshape(8, 10)[start:end].t().contiguous().t()
    uneven = ShardedTensor("uneven", data, data.dtype, tuple(data.shape), (8, 10), (start, 0), None)
    state = sharded_state(rank, world, vocabulary=10) | {"uneven": uneven}
    # Of uneven shards, Megatron's own check knows nothing.
    stock.save(state, folder, ZarrSaveShardedStrategy(), validate_access_integrity=False)


def tree(folder):
    """The files of a checkpoint: what arrays' metadata say, the bytes of chunks, the values of objects."""
    found = {}
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".pt":
            found[name] = repr(torch.load(path, weights_only=True))
        elif path.name in (".zarray", "metadata.json"):
            found[name] = json.loads(path.read_text())
            # What zarr takes where it is not named; and release 0.19 writes less.
            for extra in ("dimension_separator", "common_backend", "common_backend_version"):
                found[name].pop(extra, None)
        else:
            found[name] = path.read_bytes()
    return found


def test_what_is_saved_are_the_files_that_release_0_15_reads(ranks, tmp_path):
    ranks.run(save, str(tmp_path))
    zarr = pytest.importorskip("zarr")
    assert torch.equal(
        torch.from_numpy(zarr.open_array(tmp_path / "uneven", mode="r")[...]), torch.arange(80).reshape(8, 10)
    )
    shutil.rmtree(tmp_path / "uneven")
    assert tree(tmp_path) == tree(WRITTEN)


def try_save(kept, folder, change):
    from tensorferry.megatron import ZarrSaveShardedStrategy

    del kept
    state = sharded_state(*rank_and_world())
    del state["iteration"], state["names"]
    if torch.distributed.get_rank() == 1:
        if change == "no data":
            state["rows"].data = None
        elif change == "dtype":
            state["columns"].data = state["columns"].data.to(torch.float8_e4m3fn)
            state["columns"].dtype = torch.float8_e4m3fn
        elif change == "shape":
            state["rows"].global_shape = (24, 5)
        elif change is not None:
            state["rows"].key = change
    return outcome(lambda: ZarrSaveShardedStrategy().save(state, folder))


NOT_SAVED = {
    "no data": "rows: the main replica of a shard has no data to save",
    "dtype": "columns is of torch.float8_e4m3fn, which checkpoints of backend 'zarr' do not have",
    "shape": "rows: the ranks do not agree on it: it is torch.float32 [24, 5] on this one",
    "../rows": "it leads out of",
    "metadata.json": "'metadata.json' cannot be the key of a tensor or object: metadata.json is another file",
    "rows/.zarray": "'rows/.zarray' is a name that checkpoints of backend 'zarr' reserve",
    "rows.sync": "'rows.sync' is a name that checkpoints of backend 'zarr' reserve",
}


def test_what_cannot_be_saved_is_refused_on_every_rank(ranks, tmp_path):
    for change, text in NOT_SAVED.items():
        folder = tmp_path / change.replace("/", "_").strip(".")
        folder.mkdir()
        for message in ranks.run(try_save, str(folder), change):
            assert text in message


#: Where in a folder something is already, and what the refusal says: an array, or a link out of the folder.
IN_THE_WAY = {
    "rows": "'rows' is not written to",
    "rows/.zarray": "already exists: save into a folder of its own",
    "random": "'random/shard_0_2.pt' is not written to",
    "layers.extra_state": "'layers.extra_state/shard_0.0_1.1.pt' is not written to",
}


def test_nothing_is_saved_into_an_array_that_is_there_or_through_a_link(ranks, folder, tmp_path):
    before = tree(folder)
    for message in ranks.run(try_save, str(folder), None):
        assert "already exists: save into a folder of its own" in message
    assert tree(folder) == before
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("somebody else's")
    for at, text in IN_THE_WAY.items():
        place = tmp_path / at.replace("/", "_") / at
        place.parent.mkdir(parents=True)
        place.symlink_to(outside / "file" if "." in place.name[:1] else outside)
        for message in ranks.run(try_save, str(tmp_path / at.replace("/", "_")), None):
            assert text in message
        assert [path.name for path in outside.iterdir()] == ["file"]
        assert (outside / "file").read_text() == "somebody else's"


def test_what_lies_behind_a_link_is_loaded_and_not_left_out_of_a_list(ranks, folder, tmp_path):
    for name in ("rows", "random"):
        shutil.move(folder / name, tmp_path / f"moved-{name}")
        (folder / name).symlink_to(tmp_path / f"moved-{name}")
    assert ranks.run(load_all, str(folder), 10, True) == [[], []]
    for text in ranks.run(list_keys, str(folder)):
        assert "is a link: copy the checkpoint with what it leads to" in text


def list_keys(kept, folder):
    from tensorferry.megatron import ZarrLoadShardedStrategy

    del kept
    return outcome(lambda: ZarrLoadShardedStrategy().load_sharded_metadata(folder))
