"""The converter: from zarr and torch_dist to tensorferry's folders, and back to torch_dist."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import signal
import tarfile
from pathlib import Path

import pytest
import torch
from test_zarr import WRITTEN, memory, rank_and_world, without_random
from zarr_states import differences, expected, sharded_state

from commands import incomplete
from tensorferry.storage.boxes import Box
from tensorferry.storage.pending import pending

pytestmark = pytest.mark.process


#: Written by megatron-core 0.15.3 and torch 2.8 on two ranks (``stock_zarr.py``).
PACKED = WRITTEN.parent / "torch_dist-0.15.tar.gz"


@pytest.fixture
def torch_dist(tmp_path):
    with tarfile.open(PACKED) as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path / "torch_dist"


def convert(kept, source, output, options):
    """Converts; returns the counts, or the error."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from tensorferry.megatron.convert import convert

    del kept
    try:
        return tuple(convert(source, output, **options))
    except CheckpointingException as e:
        return str(e)


def load(kept, folder, is_ours, same_world):
    from megatron.core import dist_checkpointing as stock

    from tensorferry.megatron import load_strategy

    del kept
    rank, world = rank_and_world()
    keep = (lambda state: state) if same_world else without_random
    state = keep(sharded_state(rank, world, torch.zeros_like))
    return differences(stock.load(state, folder, load_strategy() if is_ours else None), keep(expected(rank, world)))


def test_a_checkpoint_comes_through_all_formats_as_it_was(ranks, alone, tmp_path, torch_dist):
    """Each step is read by the strategy for its format: for torch_dist, Megatron's own."""
    steps = [
        (WRITTEN, "from-zarr", "tensorferry"),
        (tmp_path / "from-zarr", "back", "torch_dist"),
        (tmp_path / "back", "again", "tensorferry"),
        (WRITTEN, "from-zarr-at-once", "torch_dist"),
        (torch_dist, "from-torch-dist", "tensorferry"),
    ]
    for source, name, to in steps:
        output = str(tmp_path / name)
        assert alone.run(convert, str(source), output, {"to": to, "window": 1 << 20}) == [(15, 3, 1661)], name
        assert json.loads((tmp_path / name / "metadata.json").read_text())["sharded_backend"] == to
        assert ranks.run(load, output, to == "tensorferry", True) == [[], []], name
        assert alone.run(load, output, to == "tensorferry", False) == [[]], name
        assert incomplete(Path(output)) == []


def large(folder, mib=96):
    """Writes a zarr checkpoint with one tensor of so many MiB in one chunk."""
    rows = mib * 256
    (folder / "key").mkdir(parents=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    about = json.loads((WRITTEN / "rows/.zarray").read_text()) | {"shape": [rows, 1024], "chunks": [rows, 1024]}
    (folder / "key/.zarray").write_text(json.dumps(about))
    (folder / "key/0.0").write_bytes(torch.arange(rows * 1024, dtype=torch.float32).numpy().tobytes())
    torch.save({"iteration": 3}, folder / "common.pt")
    return rows


def convert_measured(kept, source, output, options):
    # First a small one, for which modules are imported and threads started.
    convert(kept, str(WRITTEN), f"{output}-small", options)
    convert(kept, f"{output}-small", f"{output}-small-again", options)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    # Memory is free when nothing uses it, and does not wait for the garbage collector.
    gc.disable()
    try:
        return convert(kept, source, output, options), memory("VmHWM") - before
    finally:
        gc.enable()


def load_key(kept, folder, rows, is_ours):
    from megatron.core import dist_checkpointing as stock
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from tensorferry.megatron import load_strategy

    del kept
    shard = ShardedTensor.from_rank_offsets("key", torch.zeros(rows, 1024))
    loaded = stock.load({"key": shard}, folder, load_strategy() if is_ours else None)
    return torch.equal(loaded["key"].flatten(), torch.arange(rows * 1024, dtype=torch.float32)), loaded["iteration"]


def test_a_conversion_takes_no_more_memory_than_its_window(alone, tmp_path):
    rows = large(tmp_path / "zarr")
    for source, to in (("zarr", "tensorferry"), ("tensorferry", "torch_dist"), ("torch_dist", "tensorferry2")):
        given = {"to": to.rstrip("2"), "window": 8 << 20, "threads": 2}
        [(done, grown)] = alone.run(convert_measured, str(tmp_path / source), str(tmp_path / to), given)
        assert done == (1, 0, 96 << 20)
        # The window, and what threads, copies on their way to a file and the allocator keep.
        assert grown < 64 << 20, to
        assert max(path.stat().st_size for path in (tmp_path / to).iterdir()) < 6 << 20
    for name in ("tensorferry", "torch_dist", "tensorferry2"):
        assert alone.run(load_key, str(tmp_path / name), rows, name != "torch_dist") == [(True, 3)]


def convert_and_die(kept, source, output, to):
    """Converts in a forked process, which is killed before it writes the index."""
    from tensorferry.megatron.formats import convert_outputs

    pid = os.fork()
    if pid == 0:
        try:
            convert_outputs.OUTPUTS[to].finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            convert(kept, source, output, {"to": to})
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("to", ["tensorferry", "torch_dist"])
def test_a_killed_conversion_leaves_nothing_under_the_name_of_its_output(alone, tmp_path, to):
    output = tmp_path / "output"
    assert alone.run(convert_and_die, str(WRITTEN), str(output), to) == [-signal.SIGKILL]
    assert not output.exists()
    [left] = incomplete(output)
    assert any(left.iterdir())
    (left / "of the killed one").touch()
    assert alone.run(convert, str(WRITTEN), str(output), {"to": to}) == [(15, 3, 1661)]
    assert alone.run(load, str(output), to == "tensorferry", False) == [[]]
    assert not (output / "of the killed one").exists()
    assert incomplete(output) == []


def command(kept, *arguments):
    import contextlib
    import io

    from tensorferry.megatron.convert import main

    del kept
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        return main(list(arguments)), told.getvalue()


def test_the_command(alone, tmp_path):
    output = str(tmp_path / "output")
    told = f"{output}: 15 tensors of 1661 bytes and 3 objects, as torch_dist\n"
    assert alone.run(command, str(WRITTEN), output, "--to", "torch_dist", "--window", "1") == [(0, told)]
    [(status, told)] = alone.run(command, str(WRITTEN), output)
    assert status == 1
    assert told == f"error: {output} exists already: choose another name\n"


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/tensorferry-should-not-be-there",)


def repickled(folder, change):
    """Changes the index of a torch_dist checkpoint."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(found) or found))


def move(found):
    for info in found.storage_data.values():
        info.relative_path = f"../{info.relative_path}"


def zero_ends(folder):
    """Where each file's last archive has its directory."""
    for path in folder.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-60] + bytes(60))


def lengthen(found):
    for info in found.storage_data.values():
        info.length += 1 << 40


def forget(found):
    found.storage_data.clear()


def enlarge(found):
    for about in found.state_dict_metadata.values():
        if hasattr(about, "size"):
            about.size = torch.Size([n * 2 for n in about.size])


def flatten(found):
    """What release 0.15 noted of shards that it had flattened."""
    found.mcore_data = {"rows": {"nd_reformulated_orig_global_shape": (8, 5)}}


def swap(found):
    """The entries of two tensors of other shapes, one in place of the other."""
    at = {index.fqn: index for index in found.storage_data}
    a, b = at["rows"], at["dtypes.int64"]
    found.storage_data[a], found.storage_data[b] = found.storage_data[b], found.storage_data[a]


BAD = {
    "pickle evil": (lambda f: (f / ".metadata").write_bytes(pickle.dumps(Evil())), "not on the allow-list"),
    "pickle cut": (lambda f: (f / ".metadata").write_bytes((f / ".metadata").read_bytes()[:-9]), "cut off"),
    "no index": (lambda f: (f / ".metadata").unlink(), "is incomplete: it has no .metadata"),
    "outside": (lambda f: repickled(f, move), "names a file outside of it"),
    "too long": (lambda f: repickled(f, lengthen), "is damaged"),
    "nowhere": (lambda f: repickled(f, forget), "no rank has written"),
    "not covered": (lambda f: repickled(f, enlarge), "elements"),
    "swapped": (lambda f: repickled(f, swap), "is damaged"),
    "file cut": (lambda f: os.truncate(f / "__0_0.distcp", 1000), "__0_0.distcp is damaged"),
    "file gone": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp cannot be read"),
    "ends zeroed": (zero_ends, "cannot be read"),
    "flattened": (lambda f: repickled(f, flatten), "has flattened shards (rows), which releases since 0.16"),
    "version": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 2}'),
        "is of backend 'torch_dist', version 2",
    ),
    "backend": (lambda f: (f / "metadata.json").write_text('{"sharded_backend": "x"}'), "is of backend 'x'"),
    "no metadata.json": (lambda f: (f / "metadata.json").unlink(), "it has no metadata.json"),
}


@pytest.fixture(scope="session")
def of_torch(tmp_path_factory, host):
    """A torch_dist checkpoint of this torch, whose index this process can read and change."""
    folder = tmp_path_factory.mktemp("of-torch") / "checkpoint"
    host.job(1).run(convert, str(WRITTEN), str(folder), {"to": "torch_dist"})
    return folder


@pytest.mark.parametrize("name", BAD)
def test_bad_sources_are_refused_and_nothing_is_left(alone, of_torch, tmp_path, name):
    damage, text = BAD[name]
    folder = Path(shutil.copytree(of_torch, tmp_path / "checkpoint"))
    damage(folder)
    [told] = alone.run(convert, str(folder), str(tmp_path / "output"), {})
    assert isinstance(told, str), told
    assert text in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]
    assert not Path("/tmp/tensorferry-should-not-be-there").exists()


def wrong_arguments(kept, folder):
    from tensorferry.errors import InvalidArgument
    from tensorferry.megatron import load_strategy
    from tensorferry.megatron.convert import convert

    del kept
    told = []
    for call in (
        lambda: convert(123, folder / "output"),
        lambda: convert("http://a/b", folder / "output"),
        lambda: load_strategy(safe_globals=5),
    ):
        try:
            told.append(f"nothing was raised: {call()}")
        except InvalidArgument as e:
            told.append(str(e))
    return told


def test_wrong_arguments_are_named(alone, tmp_path):
    [(number, url, listed)] = alone.run(wrong_arguments, tmp_path)
    assert "source must be the path" in number
    assert "'http://a/b' is not a path of this machine" in url
    assert "safe_globals must be a list" in listed


def torch_saves(kept, folder):
    """Has torch save a number; returns what is said of its objects."""
    import torch.distributed.checkpoint as dcp
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from tensorferry.dcp import FileWriter
    from tensorferry.megatron import load_strategy

    del kept
    dcp.save({"w": torch.ones(3), "epoch": 3}, storage_writer=FileWriter(folder))
    try:
        return f"nothing was raised: {load_strategy().load_sharded_metadata(folder)}"
    except CheckpointingException as e:
        return str(e)


def test_an_object_that_torch_saved_is_named(alone, tmp_path):
    assert alone.run(torch_saves, tmp_path) == ["'epoch' does not have the name of an object that Megatron saves"]


def test_two_conversions_do_not_write_one_output(alone, tmp_path):
    (tmp_path / "output.partial").mkdir()
    (tmp_path / "output.partial" / "mine").write_text("kept")
    with pending(tmp_path / "output", folder=True) as folder:
        [told] = alone.run(convert, str(WRITTEN), str(tmp_path / "output"), {})
        assert f"another process is writing {tmp_path}/output: wait for it" in told
        assert folder.exists()
    assert (tmp_path / "output.partial" / "mine").read_text() == "kept"


def split_up(kept, sizes, most):
    from tensorferry.megatron.convert import split
    from tensorferry.megatron.shards import check_cover

    del kept
    boxes = list(split(Box((0,) * len(sizes), sizes), 4, most))
    check_cover("key", sizes, boxes, "the parts")
    return max(box.numel * 4 for box in boxes)


def test_no_part_is_larger_than_half_a_window(alone):
    for sizes in ((2, 3, 1000), (1, 1, 5000), (7, 1)):
        [largest] = alone.run(split_up, sizes, 1000)
        assert largest <= 1000


def shorten_index(kept, folder):
    """Has the index say that a tensor has half of the rows that its entries have."""
    from tensorferry.dcp import FileReader, index
    from tensorferry.storage import commits

    del kept
    metadata = FileReader(folder).read_metadata()
    about = metadata.state_dict_metadata["rows"]
    about.size = torch.Size((about.size[0] // 2, *about.size[1:]))
    for chunk in about.chunks:
        chunk.offsets = torch.Size((chunk.offsets[0] // 2, *chunk.offsets[1:]))
        chunk.sizes = torch.Size((chunk.sizes[0] // 2, *chunk.sizes[1:]))
    moved = {at: at for at in metadata.storage_data}
    moved |= {at: type(at)("rows", torch.Size((at.offset[0] // 2, *at.offset[1:]))) for at in moved if at.fqn == "rows"}
    metadata.storage_data = {moved[at]: ref for at, ref in metadata.storage_data.items()}
    metadata.planner_data = None
    needed = {ref.container for ref in metadata.storage_data.values()}
    encoded = index.encode(metadata, metadata.storage_data)
    commits.edit_index(Path(folder) / "index.safetensors", lambda _: (encoded, needed))


def test_an_index_that_contradicts_its_files_is_refused(alone, tmp_path):
    folder = str(tmp_path / "ours")
    alone.run(convert, str(WRITTEN), folder, {})
    alone.run(shorten_index, folder)
    [told] = alone.run(convert, folder, str(tmp_path / "output"), {})
    assert "rows: the index says torch.float32 [4, 5], but its entry has 160 bytes" in told


def test_missing_chunks_are_filled_only_where_that_is_asked_for(alone, tmp_path):
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    (folder / "rows/0.0").unlink()
    about = json.loads((folder / "rows/.zarray").read_text()) | {"fill_value": 0}
    (folder / "rows/.zarray").write_text(json.dumps(about))
    [told] = alone.run(convert, str(folder), str(tmp_path / "output"), {})
    assert "its chunk 0.0 is missing" in told
    assert "--fill-missing" in told
    assert alone.run(convert, str(folder), str(tmp_path / "output"), {"fill_missing": True}) == [(15, 3, 1661)]


def test_an_objects_pickle_is_read_with_the_allow_list(alone, tmp_path):
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    torch.save(Evil(), folder / "random/shard_0_2.pt")
    [told] = alone.run(convert, str(folder), str(tmp_path / "output"), {})
    assert "not on the allow-list" in told
    assert not Path("/tmp/tensorferry-should-not-be-there").exists()
