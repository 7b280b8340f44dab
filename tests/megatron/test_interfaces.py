"""Every interface of the founding release has its place, whichever of them the installed one still has."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from test_errors import outcome

pytestmark = pytest.mark.process


def save_and_load_directly(kept, folder):
    from importlib import import_module

    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    import tensorferry.megatron as ours

    serialization = import_module("megatron.core.dist_checkpointing.serialization")
    del kept

    def state(value):
        tensor = torch.full((4, 3), float(value))
        return {
            "w": ShardedTensor.from_rank_offsets("w", tensor, replica_id=0),
            "o": ShardedObject("o", {"step": value} if value else None, (1,), (0,), replica_id=0),
        }

    strategy = ours.save_strategy()
    strategy.save(state(7), folder)
    found = ours.load_strategy().load(state(0), folder)
    listed = [sorted(ours.load_strategy().load_sharded_metadata(folder))]
    whole = Path(folder) / "whole"
    whole.mkdir()
    module = import_module("megatron.core.dist_checkpointing")
    module.save({**state(8), "iteration": 5}, str(whole), ours.save_strategy())
    listed.append(sorted(serialization.load_sharded_metadata(str(whole), ours.load_strategy())))
    strict = module.load(state(0), str(whole), ours.load_strategy(), strict="raise_all")["o"]
    theirs = Path(folder) / "theirs"
    theirs.mkdir()
    module.save({**state(8), "iteration": 5}, str(theirs))
    try:
        listed.append(sorted(serialization.load_sharded_metadata(str(theirs))))
    except TypeError:  # Early releases cannot list their own checkpoints with a torch whose tensors have strides.
        listed.append(listed[-1])
    return float(found["w"][3, 2]), found["o"], listed, strict


def test_a_strategy_that_is_called_itself_loads_what_it_has_saved_and_lists_what_megatrons_lists(each_host, tmp_path):
    [(number, value, (direct, whole, theirs), strict)] = each_host.job(1).run(save_and_load_directly, str(tmp_path))
    assert (number, value, strict) == (7.0, {"step": 7}, {"step": 8})
    assert direct == ["o/shard_0_1", "w"]
    assert whole == theirs
    assert ("common_state/shard_0_1" in whole) == (each_host.release.startswith("0.19"))


def look(kept):
    from importlib import import_module
    from importlib.util import find_spec

    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    import tensorferry.megatron as ours
    from tensorferry.megatron import interfaces

    del kept
    base = "megatron.core.dist_checkpointing.strategies.base"
    own = find_spec(base) is None or not hasattr(import_module(base), "register_default_strategy")
    home = "tensorferry.megatron.interfaces" if own else base
    assert [name for name in interfaces.__all__ if getattr(interfaces, name).__module__ != home] == []
    assert len(interfaces.__all__) == 10
    action, default = interfaces.StrategyAction, interfaces.get_default_strategy
    assert [one.value for one in action] == ["load_common", "load_sharded", "save_common", "save_sharded"]
    save, load, common = ours.save_strategy(), ours.load_strategy(), default(action.LOAD_COMMON, "tensorferry", 1)
    with tempfile.TemporaryDirectory() as folder:
        default(action.SAVE_COMMON, "tensorferry", 1).save_common({"a": 1}, folder)
        assert common.load_common(folder) == common.load(folder) == {"a": 1}
        torch.save(os.system, Path(folder) / "common.pt")
        assert "which is not on the allow-list" in outcome(lambda: common.load(folder))
    for found, kind in (
        (default(action.SAVE_SHARDED, "tensorferry", 1), ours.SaveStrategy),
        (default(action.LOAD_SHARDED, "tensorferry", 1), ours.LoadStrategy),
        (default(action.SAVE_SHARDED, "zarr", 1), ours.ZarrSaveShardedStrategy),
        (default(action.LOAD_SHARDED, "zarr", 1), ours.TensorStoreLoadShardedStrategy),
        (save, TorchDistSaveShardedStrategy),
        (save, interfaces.AsyncSaveShardedStrategy),
        (load, interfaces.LoadShardedStrategy),
        (ours.TwoStageDataParallelLoadShardedStrategy(None), interfaces.LoadShardedStrategy),
    ):
        assert isinstance(found, kind)
        assert found.can_handle_sharded_objects
    assert (save.backend, save.version) == ("tensorferry", 1)
    load.check_backend_compatibility("tensorferry")
    load.check_version_compatibility(1)
    for call, text in (
        (lambda: default(action.LOAD_SHARDED, "nobody's", 1), "Cannot find a default strategy for: ('load_sharded', "),
        (lambda: load.check_backend_compatibility("zarr"), "of backend 'zarr'"),
        (lambda: load.check_version_compatibility(2), "version 2 of the format"),
        (lambda: load.check_version_compatibility("1"), "version '1'"),
        (lambda: ours.save({}, ".", object()), "pass what save_strategy() returns"),
    ):
        assert text in outcome(call)
    if own:
        text = outcome(lambda: ours.save({}, ".", async_sharded_save=True, async_strategy="sync"))
        assert "strategies: nvrx, mcore" in text


def test_every_interface_is_there_by_its_name(each_host):
    each_host.job(1).run(look)
