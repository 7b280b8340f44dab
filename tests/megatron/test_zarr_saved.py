"""Checkpoints of backend zarr that are saved: the files of megatron-core 0.15, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import zarr_states
from zarr_states import WRITTEN, rank_and_world, sharded_state

pytestmark = pytest.mark.nightly


def save(kept, folder):
    from megatron.core import dist_checkpointing as stock

    from tensorferry.megatron import ZarrSaveShardedStrategy

    del kept
    stock.save(sharded_state(*rank_and_world(), vocabulary=10), folder, ZarrSaveShardedStrategy())


def tree(folder):
    """The files of a checkpoint: the text of arrays' metadata, the bytes of chunks, the values of objects."""
    found = {}
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".pt":
            found[name] = repr(torch.load(path, weights_only=True))
        else:
            found[name] = path.read_bytes()
    # Release 0.19 writes less.
    config = json.loads(found.pop("metadata.json"))
    return found, config["sharded_backend"], config["sharded_backend_version"]


def test_what_is_saved_are_the_same_files(ranks, tmp_path):
    """So release 0.15 reads them: byte for byte what it has written itself."""
    ranks.run(save, str(tmp_path))
    assert tree(tmp_path) == tree(WRITTEN)


def test_another_implementation_reads_what_is_saved(ranks, tmp_path):
    zarr = pytest.importorskip("zarr")
    ranks.run(save, str(tmp_path))
    for key in ("rows", "layers", "dtypes.int64", "dtypes.bool"):
        name = key.partition(".")[2]
        wanted = zarr_states.whole(key.removeprefix("dtypes."), getattr(torch, name) if name else torch.float32)
        assert (torch.from_numpy(zarr.open_array(tmp_path / key, mode="r")[...]) == wanted).all()


def try_save(kept, folder, change):
    from megatron.core.dist_checkpointing.core import CheckpointingException

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
        elif change == "key":
            state["rows"].key = "../rows"
        elif change == "reserved":
            state["rows"].key = "metadata.json"
        elif change == "metadata":
            state["rows"].key = "rows/.zarray"
        elif change == "locks":
            state["rows"].key = "rows.sync"
        elif change == "shape":
            state["rows"].global_shape = (24, 5)
    try:
        ZarrSaveShardedStrategy().save(state, folder)
    except CheckpointingException as e:
        return str(e)
    return None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("no data", "rows: the main replica of a shard has no data to save"),
        ("dtype", "columns is of torch.float8_e4m3fn, which checkpoints of backend 'zarr' do not have"),
        ("key", "it leads out of"),
        ("reserved", "'metadata.json' cannot be the key of a tensor or object: metadata.json is another file"),
        ("metadata", "'rows/.zarray' is a name that checkpoints of backend 'zarr' reserve"),
        ("locks", "'rows.sync' is a name that checkpoints of backend 'zarr' reserve"),
        ("shape", "rows: the ranks do not agree on it: it is torch.float32 [24, 5] on this one"),
    ],
)
def test_what_cannot_be_saved_is_refused_on_every_rank(ranks, tmp_path, change, text):
    for message in ranks.run(try_save, str(tmp_path), change):
        assert text in message


def save_otherwise(kept, folder):
    from test_errors import outcome

    import tensorferry.megatron as ours

    del kept
    saves = ours.ZarrSaveShardedStrategy()
    return (
        outcome(lambda: saves.async_save({}, folder)),
        outcome(lambda: ours.ZarrSaveShardedStrategy("torch_dist", 1)),
        outcome(lambda: ours.ZarrSaveShardedStrategy("zarr", 2)),
    )


def test_another_format_is_not_promised(alone, tmp_path):
    [(in_background, backend, version)] = alone.run(save_otherwise, str(tmp_path))
    assert in_background.startswith("Cannot apply async_save to the backend 'zarr'")
    assert backend.endswith("not 'torch_dist' of version 1")
    assert version.endswith("not 'zarr' of version 2")


def test_an_array_that_is_there_is_not_saved_into(ranks, tmp_path):
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    before = tree(folder)
    for message in ranks.run(try_save, str(folder), None):
        assert "already exists: save into a folder of its own" in message
    assert tree(folder) == before
