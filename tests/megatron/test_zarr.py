"""Checkpoints of backend zarr: those that megatron-core 0.15 wrote, those that it can read, and damaged ones."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import unittest.mock
from pathlib import Path

import pytest
import torch
import zarr_states
from zarr_states import DTYPES, WRITTEN, differences, expected, rank_and_world, sharded_state

pytestmark = pytest.mark.nightly


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
        TensorStoreLoadShardedStrategy(),
        TensorStoreLoadShardedStrategy(load_directly_on_device=True),
        None if hasattr(stock.serialization, "get_default_strategy") else ZarrLoadShardedStrategy(threads=1),
    ):
        state = keep(sharded_state(rank, world, lambda part: torch.full_like(part, 1), vocabulary))
        data = state["rows"].data
        loaded = stock.load(state, folder, strategy)
        assert loaded["rows"] is data or loaded["rows"].data_ptr() == data.data_ptr()
        found += differences(loaded, keep(expected(rank, world, vocabulary)))
    return found


@pytest.mark.parametrize(("world", "vocabulary"), [(2, 10), (2, 12), (1, 12), (1, 8)])
def test_what_release_0_15_wrote_is_read(host, world, vocabulary):
    assert host.job(world).run(load_all, str(WRITTEN), vocabulary, world == 2) == [[]] * world


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


def test_its_metadata_is_read(ranks):
    for tensors, keys, missing, unexpected in ranks.run(describe, str(WRITTEN)):
        wanted = {key: (shape, torch.float32, None) for key, shape in zarr_states.SHARDED.items()}
        wanted["columns"] = ((6, 8), torch.bfloat16, None)
        wanted["vocabulary"] = ((10, 4), torch.float32, None)
        wanted |= {f"dtypes.{name}": ((3, 7), getattr(torch, name), None) for name in DTYPES}
        assert tensors == wanted
        objects = {"random/shard_0_2", "random/shard_1_2", "layers.extra_state/shard_0.0_1.1"}
        assert set(keys) == objects | wanted.keys()
        assert (missing, unexpected) == ({"columns"}, {"new"})


def test_what_early_releases_wrote_is_read(ranks, folder):
    """Without the last number in the name of an object's file, and beside the locks of a writer."""
    keys = ranks.run(describe, str(folder))[0][1]
    extra = folder / "layers.extra_state"
    (extra / "shard_0.0_1.1.pt").rename(extra / "shard_0.0_1.pt")
    (folder / "rows.sync").mkdir()
    (folder / "rows.sync" / ".zarray").touch()
    assert ranks.run(describe, str(folder))[0][1] == keys
    assert ranks.run(load_all, str(folder), 10, True) == [[], []]


def objects_below_folders(kept, folder):
    """Saves objects whose keys have slashes; returns what a folder of either backend tells of them, and has of one."""
    from megatron.core import dist_checkpointing as stock
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    from tensorferry.megatron import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy, load_strategy
    from tensorferry.megatron.convert import convert

    del kept
    state = {"w": ShardedTensor.from_rank_offsets("opt/w", torch.ones(3))}
    keys = ("opt/state", "opt/state/deep", "opt/w/extra", "plain")
    state |= {key: ShardedObject(key, {"key": key}, (2, 1), (1, 0)) for key in keys}
    (folder / "z").mkdir()
    stock.save(state, folder / "z", ZarrSaveShardedStrategy(), validate_access_integrity=False)
    done = convert(folder / "z", folder / "t")
    found = []
    for name, strategy in ("z", ZarrLoadShardedStrategy()), ("t", load_strategy()):
        wanted = {key: ShardedObject(key, None, (2, 1), (1, 0)) for key in keys}
        told = strategy.load_sharded_metadata(folder / name)
        loaded = strategy.load(wanted, folder / name)
        found.append((sorted((one.key, one.global_shape) for one in told.values() if one.key in keys), loaded))
    return keys, tuple(done), found


def test_objects_whose_keys_have_slashes_are_found_and_converted(alone, tmp_path):
    ((keys, done, found),) = alone.run(objects_below_folders, tmp_path)
    assert done == (1, 4, 12)
    assert found == [([(key, (2, 1)) for key in sorted(keys)], {key: {"key": key} for key in keys})] * 2


def save_uneven(kept, folder):
    from megatron.core import dist_checkpointing as stock
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from tensorferry.megatron import ZarrSaveShardedStrategy

    del kept
    start, end = ((0, 3), (3, 8))[torch.distributed.get_rank()]
    data = torch.arange(80).reshape(8, 10)[start:end]
    # Strided: its elements are not in the order of a chunk's.
    data = data.t().contiguous().t()
    shard = ShardedTensor("uneven", data, data.dtype, tuple(data.shape), (8, 10), (start, 0), None)
    stock.save({"uneven": shard}, folder, ZarrSaveShardedStrategy(), validate_access_integrity=False)


def load_key(kept, folder, key, shape, dtype, options, prepare=None):
    """Loads one whole tensor; returns it, its report, and what was logged, or the error."""
    import logging

    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from tensorferry.megatron import TensorStoreLoadShardedStrategy

    del kept
    strategy = TensorStoreLoadShardedStrategy(**options)
    data = torch.empty(shape, dtype=dtype)
    if prepare == "transposed":
        data = torch.empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    hidden = {}
    if prepare == "without numcodecs":
        # Before others are hidden: what is imported meanwhile is forgotten afterwards.
        import tensorstore  # noqa: F401

        hidden["numcodecs"] = None
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("tensorferry").addHandler(handler)
    try:
        with unittest.mock.patch.dict(sys.modules, hidden):
            loaded = strategy.load({"one": ShardedTensor.from_rank_offsets(key, data)}, folder)["one"]
        assert data._version, "autograd was not told that it was written to"
        # As bytes: torch would send a tensor's memory by a file, which only processes of one family can open.
        return loaded.contiguous().numpy().tobytes(), strategy.report, logged
    except CheckpointingException as e:
        return str(e), None, logged
    finally:
        logging.getLogger("tensorferry").removeHandler(handler)


def tensor(data, dtype, shape):
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def test_uneven_shards_are_saved(ranks, alone, tmp_path):
    ranks.run(save_uneven, str(tmp_path))
    [(loaded, _, _)] = alone.run(load_key, str(tmp_path), "uneven", (8, 10), torch.int64, {})
    assert torch.equal(tensor(loaded, torch.int64, (8, 10)), torch.arange(80).reshape(8, 10))
    # With the package that release 0.15 reads with.
    zarr = pytest.importorskip("zarr")
    assert torch.equal(
        torch.from_numpy(zarr.open_array(tmp_path / "uneven", mode="r")[...]), torch.arange(80).reshape(8, 10)
    )


def array(folder, key, data, chunks, **fields):
    """Writes an array by hand, uncompressed unless ``fields`` say otherwise; returns its folder."""
    path = folder / key
    path.mkdir(parents=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    about = {
        "chunks": chunks,
        "compressor": None,
        "dtype": data.numpy().dtype.str,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(data.shape),
        "zarr_format": 2,
    }
    (path / ".zarray").write_text(json.dumps(about | fields))
    padded = torch.zeros([-(-n // c) * c for n, c in zip(data.shape, chunks, strict=True)], dtype=data.dtype)
    padded[tuple(slice(0, n) for n in data.shape)] = data
    for i in range(padded.shape[0] // chunks[0]):
        for j in range(padded.shape[1] // chunks[1]):
            part = padded[i * chunks[0] : (i + 1) * chunks[0], j * chunks[1] : (j + 1) * chunks[1]]
            part = part.contiguous() if fields.get("order", "C") == "C" else part.t().contiguous()
            name = fields.get("dimension_separator", ".").join((str(i), str(j)))
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(part.numpy().tobytes())
    return path


def read_without_memory(kept, folder, refused_by):
    """Reads a compressed chunk for which the machine has no memory, and a damaged one; returns class and text."""
    from tensorferry.errors import SystemRefused
    from tensorferry.megatron.formats import zarr_chunks
    from tensorferry.megatron.formats.zarr_arrays import open_array

    del kept

    def refuse(*_):
        raise SystemRefused("all memory of this machine is 5")

    told = []
    replaced = {"before": "_check_machine_has", "in the file": "read_whole"}.get(refused_by, "nothing")
    with unittest.mock.patch.object(zarr_chunks, replaced, refuse, create=True):
        try:
            zarr_chunks.decompressed(open_array(Path(folder), "key"), (0, 0))
        except Exception as e:
            told.append((type(e).__name__, str(e)))
    return told


@pytest.mark.parametrize("refused_by", ["before", "in the file", "nobody"])
def test_a_refusal_of_memory_for_a_compressed_chunk_is_not_called_damage(alone, tmp_path, refused_by):
    """A user who is told of damage deletes a checkpoint that is whole."""
    path = array(tmp_path, "key", torch.ones(4, 4), [4, 4], compressor={"id": "zlib", "level": 1})
    (path / "0.0").write_bytes(b"no zlib")
    [[(kind, text)]] = alone.run(read_without_memory, str(tmp_path), refused_by)
    if refused_by == "nobody":
        assert kind == "CheckpointingException"
        assert "is damaged" in text
    else:
        assert (kind, "all memory of this machine is 5" in text) == ("SystemRefused", True)
        assert "damaged" not in text


DATA = torch.arange(1000 * 700, dtype=torch.float32).reshape(1000, 700)


@pytest.mark.parametrize(
    ("chunks", "fields", "dtype", "prepare"),
    [
        ([300, 200], {}, torch.float32, None),
        ([300, 200], {"order": "F", "dimension_separator": "/"}, torch.float32, None),
        ([1000, 700], {}, torch.float64, None),
        ([700, 1000], {}, torch.float32, "transposed"),
        ([1, 700], {}, torch.float32, None),
    ],
    ids=str,
)
def test_any_grid_of_chunks_is_read_into_any_target(alone, tmp_path, chunks, fields, dtype, prepare):
    array(tmp_path, "key", DATA, chunks, **fields)
    [(loaded, _, _)] = alone.run(load_key, str(tmp_path), "key", DATA.shape, dtype, {}, prepare)
    assert torch.equal(tensor(loaded, dtype, DATA.shape), DATA.to(dtype))


def load_columns(kept, folder, rows, columns):
    """Loads half of the columns; returns their sum, the report, and by how much memory grew beyond the target."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from tensorferry.megatron import ZarrLoadShardedStrategy

    del kept
    strategy = ZarrLoadShardedStrategy(threads=2)
    data = torch.zeros(rows, columns // 2)
    shard = ShardedTensor("key", data, data.dtype, data.shape, (rows, columns), (0, columns // 2), None)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    strategy.load({"one": shard}, folder)
    return float(data.sum()), strategy.report, memory("VmHWM") - before


def memory(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def test_a_part_of_a_large_chunk_is_read_without_the_rest(alone, tmp_path):
    """128 MiB in one chunk, of which half is wanted: neither the chunk nor a copy of the half is in memory."""
    rows, columns = 512, 65536
    path = array(tmp_path, "key", torch.zeros(1, 1), [1, 1])
    rewrite(path, shape=[rows, columns], chunks=[rows, columns])
    with (path / "0.0").open("wb") as file:
        file.truncate(rows * columns * 4)
        for row in range(rows):
            file.seek((row * columns + columns - 1) * 4)
            file.write(torch.tensor([1.0]).numpy().tobytes())
    [(total, report, grown)] = alone.run(load_columns, str(tmp_path), rows, columns)
    assert total == rows
    assert report["bytes"] == rows * columns // 2 * 4
    assert grown < 32 << 20


@pytest.mark.parametrize("compressor", ["blosc", "zstd", "gzip", "zlib", "bz2"])
def test_compressed_chunks_are_read(alone, tmp_path, compressor):
    numcodecs = pytest.importorskip("numcodecs")
    codec = numcodecs.get_codec({"id": compressor})
    # tensorstore does not know zstd's "checksum", which only newer versions of numcodecs write.
    about = {key: value for key, value in codec.get_config().items() if key != "checksum"}
    path = array(tmp_path, "key", DATA, [300, 400], compressor=about)
    for chunk in path.glob("*.*"):
        if chunk.name != ".zarray":
            chunk.write_bytes(codec.encode(chunk.read_bytes()))
    pytest.importorskip("tensorstore")
    for prepare in (None, "without numcodecs"):
        [(loaded, _, _)] = alone.run(load_key, str(tmp_path), "key", DATA.shape, DATA.dtype, {}, prepare)
        assert torch.equal(tensor(loaded, DATA.dtype, DATA.shape), DATA), prepare


def test_missing_chunks_are_filled_and_reported_only_where_there_is_a_fill_value(alone, tmp_path):
    path = array(tmp_path, "key", DATA, [500, 700], fill_value=3)
    (path / "1.0").unlink()
    [(loaded, report, logged)] = alone.run(load_key, str(tmp_path), "key", DATA.shape, DATA.dtype, {})
    loaded = tensor(loaded, DATA.dtype, DATA.shape)
    assert (loaded[500:] == 3).all()
    assert torch.equal(loaded[:500], DATA[:500])
    assert report["filled"] == 1
    assert "1 chunks are missing and were taken to hold the fill value of their array: key" in logged[0]
    about = json.loads((path / ".zarray").read_text()) | {"fill_value": None}
    (path / ".zarray").write_text(json.dumps(about))
    [(error, _, _)] = alone.run(load_key, str(tmp_path), "key", DATA.shape, DATA.dtype, {})
    assert "its chunk 1.0 is missing, and it has no fill value. Restore the file" in error


def test_chunks_that_are_too_many_are_not_counted_one_by_one(alone, tmp_path):
    shape = (2, 1 << 20)
    array(tmp_path, "key", torch.zeros(1, 1), [1, 1], shape=shape)
    [(error, _, _)] = alone.run(load_key, str(tmp_path), "key", shape, torch.float32, {})
    assert "are too small to be shards of a tensor" in error


def try_load(kept, folder, change=None, options=None):
    """Loads all; returns the class and text of the error."""
    from tensorferry.megatron import ZarrLoadShardedStrategy
    from tensorferry.megatron.shards import leaves

    del kept
    state = sharded_state(*rank_and_world(), torch.zeros_like, 10)
    del state["iteration"], state["names"]
    if change is not None:
        name, value = change
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


BAD = {
    "chunk gone": (lambda f: (f / "rows/1.0").unlink(), "its chunk 1.0 is missing"),
    "chunk short": (lambda f: shorten(f / "rows/1.0"), "1.0 is damaged: it has 79 bytes, and a chunk of"),
    "chunk long": (lambda f: (f / "rows/1.0").write_bytes(bytes(81)), "is damaged: it has 81 bytes"),
    "chunk is a pipe": (lambda f: become_pipe(f / "rows/1.0"), "is not a regular file"),
    "array gone": (lambda f: shutil.rmtree(f / "rows"), "the checkpoint has no tensor 'rows'"),
    "array not JSON": (lambda f: (f / "rows/.zarray").write_text("{"), "is not the metadata of an array"),
    "array deep": (lambda f: (f / "rows/.zarray").write_text("[" * 100000), "is not the metadata of an array"),
    "chunks of nothing": (lambda f: rewrite(f / "rows", chunks=[0, 5]), "chunks are [0, 5]"),
    "chunks too many": (lambda f: rewrite(f / "rows", chunks=[4, 5, 1]), "differ in the number of dimensions"),
    "shape negative": (lambda f: rewrite(f / "rows", shape=[-8, 5]), "shape is [-8, 5]"),
    "shape huge": (lambda f: rewrite(f / "rows", shape=[2**59, 5]), "is too large for a tensor"),
    "shape another": (lambda f: rewrite(f / "rows", shape=[9, 5]), "Global shape mismatch for loaded ((9, 5))"),
    "dtype of objects": (lambda f: rewrite(f / "rows", dtype="|O"), "dtype '|O' is none of"),
    "filter that unpickles": (lambda f: rewrite(f / "rows", filters=[{"id": "pickle"}]), "pass through filters"),
    "compressor that unpickles": (lambda f: rewrite(f / "rows", compressor={"id": "pickle"}), "is none of"),
    "compressed bomb": (
        lambda f: (
            rewrite(f / "rows", compressor={"id": "gzip"}),
            (f / "rows/0.0").write_bytes(gzip.compress(bytes(10 << 20))),
            (f / "rows/1.0").write_bytes(gzip.compress(bytes(10 << 20))),
        ),
        "it does not hold exactly that",
    ),
    "announced bomb": (
        lambda f: (
            rewrite(f / "rows", compressor={"id": "blosc"}),
            *[
                (f / f"rows/{n}.0").write_bytes(b"\x02\x01\x21\x04" + b"\xff\xff\xff\x7f" * 3 + bytes(9))
                for n in (0, 1)
            ],
        ),
        "it announces 2147483647 bytes",
    ),
    "chunks of one element": (
        lambda f: rewrite(f / "dtypes.int64", shape=[2**40, 3], chunks=[1, 1]),
        "Global shape mismatch",
    ),
    "fill value": (lambda f: rewrite(f / "rows", fill_value=10**400), "is not the metadata of an array"),
    "array is a pipe": (lambda f: become_pipe(f / "rows/.zarray"), "is not a regular file"),
    "version 3": (lambda f: (f / "rows/.zarray").rename(f / "rows/zarr.json"), "is an array of Zarr version 3"),
    "object gone": (lambda f: (f / "random/shard_1_2.pt").unlink(), "Object shard"),
    "object evil": (lambda f: torch.save(Evil(), f / "random/shard_1_2.pt"), "not on the allow-list"),
    "object damaged": (lambda f: shorten(f / "random/shard_1_2.pt"), "random/shard_1_2"),
    "no metadata.json": (lambda f: (f / "metadata.json").unlink(), "it has no metadata.json"),
    "metadata.json damaged": (lambda f: (f / "metadata.json").write_text("{"), "metadata.json cannot be read"),
    "another backend": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "torch_dist"}'),
        "is of backend 'torch_dist'",
    ),
    "a newer version": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 2}'),
        "has version 2 of the format",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_are_refused_on_every_rank(ranks, folder, name):
    damage, text = BAD[name]
    damage(folder)
    for kind, message, touched in ranks.run(try_load, str(folder)):
        assert kind == "CheckpointingException"
        assert text in message
        assert not touched or "compress" in name or "bomb" in name
    assert not Path("/tmp/tensorferry-should-not-be-there").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("key", "../outside"), "it leads out of"),
        (("key", "/etc"), "it leads out of"),
        (("key", "a\0b"), "it leads out of"),
        (("key", "other"), "the checkpoint has no tensor 'other'"),
        (("object", "../random"), "it leads out of"),
        (("rows", 16), "Global shape mismatch"),
        (("data", 5), "rows: its data cannot be written to"),
    ],
    ids=str,
)
def test_bad_requests_are_refused_on_every_rank(ranks, folder, change, text):
    shutil.copytree(folder / "rows", folder.parent / "outside")
    for kind, message, touched in ranks.run(try_load, str(folder), change):
        assert kind == "CheckpointingException"
        assert text in message
        assert not touched


def test_trusted_pickles_are_read(ranks, folder):
    """What a user may allow; the class is one that the ranks know."""
    torch.save(zarr_states.differences, folder / "random/shard_1_2.pt")
    refused = ranks.run(try_load, str(folder))
    assert all("zarr_states.differences" in message for _, message, _ in refused)
    assert ranks.run(try_load, str(folder), None, {"safe_globals": [zarr_states.differences]}) == [None, None]


def pad(kept):
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from tensorferry.megatron.zarr import pad_to_expected_shape

    del kept
    part = torch.arange(6.0).reshape(2, 3)
    shard = ShardedTensor.from_rank_offsets("key", torch.ones(4, 3), (0, 0, 1), allow_shape_mismatch=True)
    padded = pad_to_expected_shape(part, shard)
    try:
        pad_to_expected_shape(torch.ones(5, 3), shard)
    except CheckpointingException as e:
        return padded.tolist(), str(e)
    return padded.tolist(), None


def test_a_part_is_padded_behind_its_end(alone):
    [(padded, error)] = alone.run(pad)
    assert padded == [[0, 1, 2], [3, 4, 5], [0, 0, 0], [0, 0, 0]]
    assert "Expected shape (4, 3) smaller than actual (5, 3) for key" in error
