"""Whatever is wrong, on whichever rank: Megatron's own exception on every rank, with a text that says what to do."""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path

import pytest
import torch
from placed import save, sharded_state

pytestmark = pytest.mark.process


def outcome(call):
    """What a call raises, as text; or that it raises nothing."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        call()
    except CheckpointingException as e:
        return str(e)
    except BaseException:
        return f"another exception: {traceback.format_exc()}"
    return "nothing was raised"


def tensor(key, rank, world, rows=4, **options):
    from megatron.core.dist_checkpointing import ShardedTensor

    return ShardedTensor.from_rank_offsets(key, torch.full((rows, 3), float(rank)), (0, rank, world), **options)


def save_wrong(kept, folder, wrong):
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

    import tensorferry.megatron as ours

    del kept
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state = {"w": tensor("w", rank, world), "o": ShardedObject("o", rank, (world,), (rank,))}

    def refuse(*_):
        raise RuntimeError("no factory today")

    if wrong == "missing" and rank == 1:
        state["w"].replica_id = 1
    elif wrong == "twice" and rank == 1:
        state["w"] = tensor("w", 0, world)
    elif wrong == "no data" and rank == 1:
        state["w"].data = None
    elif wrong == "dtype" and rank == 1:
        state["w"].data, state["w"].dtype = state["w"].data.half(), torch.float16
    elif wrong == "shape" and rank == 1:
        state["w"].data = torch.zeros(2, 2)
    elif wrong == "object twice" and rank == 1:
        state["o"] = ShardedObject("o", rank, (world,), (0,))
    elif wrong == "object" and rank == 1:
        state["o"].data = lambda: None
    elif wrong == "factory" and rank == 1:
        state["f"] = ShardedTensorFactory("f", torch.zeros(2), refuse, refuse)
    elif wrong == "folder":
        folder += "/nowhere"
    return outcome(lambda: ours.save(state, folder))


SAVES = {
    "missing": "Invalid access pattern for w: .* 12 of the 24 elements .* a shard is missing",
    "twice": r"Invalid access pattern for w: .* the shard \[0:4, 0:3\] more than once: .* another replica_id",
    "no data": r"w: the main replica of a shard has no data to save \(at w\)",
    "dtype": r"w: the ranks do not agree on it: it is torch.float16 \[8, 3\] on rank 1",
    "shape": r"w: its data has shape \[2, 2\], but its local_shape is \[4, 3\]",
    "object twice": "Duplicate ShardedObject keys: o/shard_0_2",
    "object": "rank 1",
    "factory": r"RuntimeError: no factory today \(rank 1\)",
    "folder": "Checkpoint directory .*/nowhere does not exist: create it first",
}


def test_a_state_that_cannot_be_saved_is_refused_on_every_rank(host, tmp_path):
    for wrong, text in SAVES.items():
        told = host.job(2).run(save_wrong, str(tmp_path), wrong)
        assert len(set(told)) == 1, told
        assert re.match(f"cannot .*({text})", told[0]), told[0]
    assert not (tmp_path / "metadata.json").exists()


def load_wrong(kept, folder, wrong, through_megatron):
    import megatron.core.dist_checkpointing as stock

    import tensorferry.megatron as ours

    rank = torch.distributed.get_rank()
    state = sharded_state(kept["place"], empty=True)
    live = state["padded"].data = torch.full_like(state["padded"].data, 7)
    if wrong == "shape" and rank == 1:
        state["scalar"] = tensor("scalar", 0, 1, replica_id=1)
    elif wrong == "global shape":
        state["padded"].allow_shape_mismatch = False
        state["padded"].global_shape = (21, 3)
    elif wrong == "unknown key" and rank == 1:
        state["new"] = tensor("new", 0, 1)
    elif wrong == "object" and rank == 1:
        state["scalar"].key = "layers.extra/shard_0_4"
    elif wrong == "flattened" and rank == 1:
        state["scalar"].flattened_range = slice(0, 1)
    load = stock.load if through_megatron else ours.load
    told = outcome(lambda: load(state, folder, ours.load_strategy(), validate_access_integrity=False))
    # Also where another rank asks for what is wrong.
    assert wrong is None or bool((live == 7).all())
    return told


LOADS = {
    "shape": r"expected \(\[4, 3\]\) tensor for key scalar: .* \(rank 1\)",
    "global shape": r"Global shape mismatch for loaded \(\[20, 3\]\) and expected \(\[21, 3\]\) tensor for key "
    "vocabulary: .*allow_shape_mismatch=True",
    "unknown key": r"Unexpected keys \(not found in the checkpoint\): \['new'\].* Pass strict= .*\(rank 1\)",
    "object": r"layers.extra/shard_0_4: the checkpoint has an object of this key, and not a tensor \(rank 1\)",
    "flattened": r"scalar: flattened_range is not supported.* \(rank 1\)",
}


def change_config(folder, **fields):
    path = folder / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def damage_file(folder):
    path = rank_file(folder)
    data = bytearray(path.read_bytes())
    data[-600] ^= 1
    path.write_bytes(data)


def rank_file(folder):
    return next(folder.glob("rank00001-*.safetensors"))


#: How a checkpoint is damaged, and what loads say of it.
FOLDERS = {
    "empty metadata.json": (
        lambda f: (f / "metadata.json").write_text(""),
        r"metadata.json cannot be read .*restore_common\(folder\)",
    ),
    "another backend": (
        lambda f: change_config(f, sharded_backend="zarr"),
        "backend 'zarr', and this strategy reads 'tensorferry'",
    ),
    "newer": (
        lambda f: change_config(f, sharded_backend_version=99),
        "version 99 of the format .*: update tensorferry",
    ),
    "no index": (lambda f: (f / "index.safetensors").unlink(), "incomplete"),
    "no file": (lambda f: rank_file(f).unlink(), "its index names rank00001-.*, and there is no such file"),
    "damaged": (damage_file, "rank00001-.*does not match"),
    "another common.pt": (
        lambda f: torch.save({"iteration": 9}, f / "common.pt"),
        r"common.pt is not that of the checkpoint: .*restore_common\(folder\)",
    ),
}


def lose_a_chunk(kept, folder):
    """Takes a chunk out of the index, as if a rank had not told of it."""
    from tensorferry._native import Index
    from tensorferry.storage import commits, reserved

    del kept
    path = Path(folder) / "index.safetensors"
    text, commit = commits.read(path)
    whole, less = Index.decode(text, len(commit.files)), Index()
    for number, key in enumerate(whole.keys):
        _, _, dtype, shape, *_ = whole.item(number)
        less.add(key, dtype, shape)
        for offsets, sizes, _, entry, nbytes, kind, _ in whole.chunks(number)[key == "layers.column" :]:
            less.add_chunk(offsets, sizes, entry, nbytes, kind)
    commits.commit_index(path, [(reserved.INDEX, less.encode())], commit)


def test_an_index_that_is_not_complete_is_refused_on_every_rank(host, tmp_path):
    host.job(2).run(save, str(tmp_path))
    host.job(1).run(lose_a_chunk, str(tmp_path))
    for one in host.job(2).run(load_wrong, str(tmp_path), None, False):
        assert re.match(r"cannot load .*: layers.column: the checkpoint has 0 of the 1152 elements of the shard", one)


def load_without_main(kept, folder):
    import tensorferry.megatron as ours

    def load(checks):
        state = sharded_state(kept["place"], empty=True)
        # Every rank calls its own a copy.
        state["scalar"].replica_id = 1
        ours.load(state, folder, validate_access_integrity=checks)

    return outcome(lambda: load(True)), outcome(lambda: load(False))


def test_who_has_which_shard_is_checked_on_every_rank_unless_it_is_not_asked_for(host, tmp_path):
    host.job(2).run(save, str(tmp_path))
    for checked, unchecked in host.job(2).run(load_without_main, str(tmp_path)):
        assert re.match("cannot load .*: Invalid access pattern for scalar", checked)
        assert unchecked == "nothing was raised"


def test_a_load_that_cannot_be_is_refused_on_every_rank(host, tmp_path):
    host.job(2).run(save, str(tmp_path))
    for through_megatron in (False, True):
        for wrong, text in LOADS.items():
            told = host.job(2).run(load_wrong, str(tmp_path), wrong, through_megatron)
            for one in told:
                assert not one.startswith("another exception"), (wrong, one)
                assert re.search(text, one), (wrong, one)


def test_a_folder_that_is_not_whole_is_refused_on_every_rank(host, tmp_path):
    for number, (how, (damage, text)) in enumerate(FOLDERS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        host.job(2).run(save, str(folder))
        damage(folder)
        for one in host.job(2).run(load_wrong, str(folder), None, False):
            assert re.search(text, one), (how, one)
    # As a folder that was saved by calling the strategy itself.
    host.job(2).run(save, str(tmp_path))
    (tmp_path / "metadata.json").unlink()
    assert host.job(2).run(load_wrong, str(tmp_path), None, False) == ["nothing was raised"] * 2


def restore(kept, folder):
    import tensorferry.megatron as ours

    if torch.distributed.get_rank() == 0:
        ours.restore_common(folder)
    torch.distributed.barrier()
    return ours.load(sharded_state(kept["place"], empty=True), folder)["iteration"]


def test_a_common_part_of_another_save_can_be_mended(host, tmp_path):
    host.job(2).run(save, str(tmp_path))
    for how in ("another common.pt", "empty metadata.json"):
        FOLDERS[how][0](tmp_path)
    assert host.job(2).run(restore, str(tmp_path)) == [103, 103]
