"""A save replaces a checkpoint in the middle of a load: the load gives one save, or says that it cannot."""

from __future__ import annotations

import re

import pytest
import torch

pytestmark = pytest.mark.process


def state_of(number):
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shard = ShardedTensor.from_rank_offsets("w", torch.full((4, 3), float(number)), (0, rank, world))
    return {"w": shard, "o": ShardedObject("o", number, (world,), (rank,)), "iteration": number}


def load_while_replaced(kept, folder, name, strategy_of):
    """Loads save 1, which save 2 replaces right after ``name`` of the strategy has returned."""
    from unittest import mock

    from megatron.core.dist_checkpointing.core import CheckpointingException

    import tensorferry.megatron as ours
    from tensorferry.megatron.load import LoadStrategy

    del kept
    ours.save(state_of(1), folder)
    original, replaced = getattr(LoadStrategy, name), []

    def before(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        if not replaced:
            replaced.append(True)
            ours.save(state_of(2), folder)
        return found

    def load():
        strategy = ours.load_strategy()
        if strategy_of == "wrapped":
            from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

            strategy = FullyParallelLoadStrategyWrapper(strategy)
        found = ours.load(state_of(-1), folder, strategy)
        return {float(found["w"][0, 0]), float(found["o"]), float(found["iteration"])}

    with mock.patch.object(LoadStrategy, name, before):
        try:
            during = load()
        except CheckpointingException as e:
            during = str(e)
    assert replaced
    return during, load()


def test_the_common_state_and_the_tensors_are_of_one_save(host, tmp_path):
    for strategy in ("plain", "wrapped"):
        for name in ("encoded_common", "decoded_common", "check_folder"):
            folder = tmp_path / f"{strategy}-{name}"
            folder.mkdir()
            ((during, after),) = host.job(1).run(load_while_replaced, str(folder), name, strategy)
            assert during in ({1.0}, {2.0}) or re.search("another save has replaced .* load again", during), during
            assert after == {2.0}


def save_without_commit(kept, folder, is_committed):
    """Saves 1, and then 2, which fails when it replaces the index, or after that; returns what a load finds."""
    from unittest import mock

    from megatron.core.dist_checkpointing.core import CheckpointingException

    import tensorferry.megatron as ours
    from tensorferry.errors import SystemRefused
    from tensorferry.storage import commits

    del kept
    ours.save(state_of(1), folder)
    original = commits.commit_index

    def refused(*args, **kwargs):
        if is_committed:
            original(*args, **kwargs)
        raise SystemRefused(28, "no space")

    told = "nothing was raised"
    with mock.patch.object(commits, "commit_index", refused):
        try:
            ours.save(state_of(2), folder)
        except CheckpointingException as e:
            told = str(e)
    found = ours.load(state_of(-1), folder)
    return told, float(found["w"][0, 0]), found["o"], found["iteration"]


def test_a_save_whose_commit_fails_leaves_a_checkpoint_that_loads(host, tmp_path):
    for is_committed, number in ((False, 1), (True, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for told, *found in host.job(2).run(save_without_commit, str(folder), is_committed):
            assert "no space" in told
            assert found == [number] * 3
