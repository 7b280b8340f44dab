"""The converter: from zarr and torch_dist to tensorferry's folders, and back to torch_dist."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from test_zarr import Evil, without_random
from zarr_states import WRITTEN, differences, expected, rank_and_world, sharded_state

from commands import incomplete
from tensorferry.storage.pending import pending

pytestmark = pytest.mark.process


#: Written by megatron-core 0.15.3, as ``zarr_states.py`` says.
PACKED = WRITTEN.parent / "torch_dist-0.15.tar.gz"


@pytest.fixture
def torch_dist(tmp_path):
    with tarfile.open(PACKED) as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path / "torch_dist"


def convert(kept, source, output, options, window=1 << 10):
    """Converts; returns the counts, or the error."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from tensorferry.errors import InvalidArgument
    from tensorferry.megatron import convert as converting

    del kept
    converting.WINDOW = window
    try:
        return tuple(converting.convert(source, output, **options))
    except (CheckpointingException, InvalidArgument) as e:
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
        assert alone.run(convert, str(source), output, {"to": to}) == [(15, 3, 1661)], name
        assert json.loads((tmp_path / name / "metadata.json").read_text())["sharded_backend"] == to
        # No more than the window is in a file, and so in memory.
        assert len(list(Path(output).glob("rank*" if to == "tensorferry" else "*.distcp"))) > 1
        assert ranks.run(load, output, to == "tensorferry", True) == [[], []], name
        assert alone.run(load, output, to == "tensorferry", False) == [[]], name
        assert incomplete(Path(output)) == []


def enlarge(folder):
    """Has the index of a torch_dist checkpoint say that a tensor is larger than its chunks."""
    found = pickle.loads((folder / ".metadata").read_bytes())
    found.state_dict_metadata["rows"].size = torch.Size([16, 5])
    (folder / ".metadata").write_bytes(pickle.dumps(found))


#: What else can be wrong with an index of torch's, its reader finds, which has tests of its own.
BAD = {
    "pickle evil": (lambda f: (f / ".metadata").write_bytes(pickle.dumps(Evil())), "not on the allow-list"),
    "not covered": (enlarge, "elements"),
    "file cut": (lambda f: os.truncate(f / "__0_0.distcp", 1000), "__0_0.distcp is cut off"),
    "no metadata.json": (lambda f: (f / "metadata.json").unlink(), "it has no metadata.json"),
    "version": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 2}'),
        "is of backend 'torch_dist', version 2",
    ),
}


def test_bad_sources_are_refused_and_nothing_is_left(alone, tmp_path):
    # Of this torch, whose index this process can read and change.
    alone.run(convert, str(WRITTEN), str(tmp_path / "good"), {"to": "torch_dist"}, 1 << 20)
    for name, (damage, text) in BAD.items():
        folder = Path(shutil.copytree(tmp_path / "good", tmp_path / name / "checkpoint"))
        damage(folder)
        [told] = alone.run(convert, str(folder), str(tmp_path / name / "output"), {})
        assert isinstance(told, str), name
        assert text in told, name
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"], name
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    torch.save(Evil(), folder / "random/shard_0_2.pt")
    [told] = alone.run(convert, str(folder), str(tmp_path / "output"), {})
    assert "not on the allow-list" in told
    assert not Path("/tmp/tensorferry-should-not-be-there").exists()


def test_wrong_arguments_and_outputs_are_named(alone, tmp_path):
    for source, options, text in (
        (123, {}, "source must be the path"),
        ("http://a/b", {}, "'http://a/b' is not a path of this machine"),
        (str(WRITTEN), {"to": "zarr"}, "to must be tensorferry or torch_dist"),
    ):
        [told] = alone.run(convert, source, str(tmp_path / "output"), options)
        assert text in told
    with pending(tmp_path / "output", folder=True) as folder:
        [told] = alone.run(convert, str(WRITTEN), str(tmp_path / "output"), {})
        assert f"another process is writing {tmp_path}/output: wait for it" in told
        assert folder.exists()
    (tmp_path / "output").mkdir(exist_ok=True)
    (tmp_path / "output" / "mine").touch()
    [told] = alone.run(convert, str(WRITTEN), str(tmp_path / "output"), {})
    assert f"{tmp_path}/output exists already" in told


def torch_saves(kept, folder):
    """Has torch save a number; returns what is said of its objects."""
    import torch.distributed.checkpoint as dcp
    from test_errors import outcome

    from tensorferry.dcp import FileWriter
    from tensorferry.megatron import load_strategy

    del kept
    dcp.save({"w": torch.ones(3), "epoch": 3}, storage_writer=FileWriter(folder))
    return outcome(lambda: load_strategy().load_sharded_metadata(folder))


def test_an_object_that_torch_saved_is_named(alone, tmp_path):
    assert alone.run(torch_saves, tmp_path) == ["'epoch' does not have the name of an object that Megatron saves"]


def objects_below_folders(kept, folder):
    """Saves objects whose keys have slashes; returns what a folder of either backend tells of them, and has of one."""
    from megatron.core import dist_checkpointing as stock
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    from tensorferry.megatron import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy, load_strategy

    keys = ("opt/state", "opt/state/deep", "opt/w/extra", "plain")
    state = {
        "w": ShardedTensor.from_rank_offsets("opt/w", torch.ones(3)),
        "e": ShardedTensor.from_rank_offsets("e", torch.ones(0, 2)),
    }
    state |= {key: ShardedObject(key, {"key": key}, (2, 1), (1, 0)) for key in keys}
    (folder / "z").mkdir()
    stock.save(state, folder / "z", ZarrSaveShardedStrategy(), validate_access_integrity=False)
    done = convert(kept, folder / "z", folder / "t", {})
    found = []
    for name, strategy in ("z", ZarrLoadShardedStrategy()), ("t", load_strategy()):
        wanted = {key: ShardedObject(key, None, (2, 1), (1, 0)) for key in keys}
        told = strategy.load_sharded_metadata(folder / name)
        loaded = strategy.load(wanted, folder / name)
        found.append((sorted((one.key, one.global_shape) for one in told.values() if one.key in keys), loaded))
    return keys, done, found


def test_objects_whose_keys_have_slashes_are_found_and_converted(alone, tmp_path):
    ((keys, done, found),) = alone.run(objects_below_folders, tmp_path)
    assert done == (2, 4, 12)
    assert found == [([(key, (2, 1)) for key in sorted(keys)], {key: {"key": key} for key in keys})] * 2
