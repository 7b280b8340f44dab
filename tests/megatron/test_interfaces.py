"""Every interface of the founding release has its place, whichever of them the installed one still has."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

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


def test_a_strategy_that_is_called_itself_loads_what_it_has_saved_and_lists_what_megatrons_lists(host, tmp_path):
    [(number, value, (direct, whole, theirs), strict)] = host.job(1).run(save_and_load_directly, str(tmp_path))
    assert (number, value, strict) == (7.0, {"step": 7}, {"step": 8})
    assert direct == ["o/shard_0_1", "w"]
    assert whole == theirs
    assert ("common_state/shard_0_1" in whole) == (host.release.startswith("0.19"))


def load_without_state(kept, folder):
    import logging

    from megatron.core.dist_checkpointing import ShardedTensor

    import tensorferry.megatron as ours

    del kept
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("tensorferry").addHandler(handler)

    def state(*keys):
        return {key: ShardedTensor.from_rank_offsets(key, torch.ones(2), replica_id=0) for key in keys}

    keys = ["w", "optimizer.fp32_param.w", "optimizer.state.exp_avg.w"]
    ours.save_strategy().save(state(*keys), folder)
    for asked in (keys, keys[:1], keys[:2], keys[:2]):
        ours.load_strategy().load(state(*asked), folder)
        records.append(len(asked))
    logging.getLogger("tensorferry").removeHandler(handler)
    return records


def test_a_load_that_leaves_an_optimizer_without_its_state_warns_once(host, tmp_path):
    [[three, one, text, *last]] = host.job(1).run(load_without_state, str(tmp_path))
    assert (three, one, last) == (3, 1, [2, 2])
    assert "(optimizer.state.*)" in text


def look(kept):
    from importlib import import_module
    from importlib.util import find_spec

    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from test_errors import outcome

    import tensorferry.megatron as ours
    from tensorferry.megatron import interfaces

    del kept
    base = "megatron.core.dist_checkpointing.strategies.base"
    own = find_spec(base) is None or not hasattr(import_module(base), "register_default_strategy")
    names = (
        "StrategyAction", "LoadStrategyBase", "SaveStrategyBase", "LoadCommonStrategy", "SaveCommonStrategy",
        "LoadShardedStrategy", "SaveShardedStrategy", "AsyncSaveShardedStrategy", "get_default_strategy",
        "register_default_strategy",
    )  # fmt: skip
    home = "tensorferry.megatron.interfaces" if own else base
    elsewhere = [name for name in names if getattr(interfaces, name).__module__ != home]
    action = interfaces.StrategyAction
    save, load = ours.save_strategy(), ours.load_strategy()
    with tempfile.TemporaryDirectory() as folder:
        interfaces.get_default_strategy(action.SAVE_COMMON, "tensorferry", 1).save_common({"a": 1}, folder)
        common = interfaces.get_default_strategy(action.LOAD_COMMON, "tensorferry", 1)
        found = (common.load_common(folder), common.load(folder))
        torch.save(os.system, Path(folder) / "common.pt")
        refused = outcome(lambda: common.load(folder))
    return {
        "common": found,
        "unsafe": refused,
        "elsewhere": elsewhere,
        "actions": [one.value for one in action],
        "registered": [
            isinstance(interfaces.get_default_strategy(action.SAVE_SHARDED, "tensorferry", 1), ours.SaveStrategy),
            isinstance(interfaces.get_default_strategy(action.LOAD_SHARDED, "tensorferry", 1), ours.LoadStrategy),
        ],
        "unknown": outcome(lambda: interfaces.get_default_strategy(action.LOAD_SHARDED, "nobody's", 1)),
        "kinds": [
            isinstance(save, TorchDistSaveShardedStrategy),
            isinstance(save, interfaces.AsyncSaveShardedStrategy),
            isinstance(save, interfaces.SaveStrategyBase),
            isinstance(load, interfaces.LoadShardedStrategy),
            isinstance(load, interfaces.LoadStrategyBase),
            issubclass(ours.TwoStageDataParallelLoadShardedStrategy, interfaces.LoadShardedStrategy),
            save.can_handle_sharded_objects,
            load.can_handle_sharded_objects,
            (save.backend, save.version) == ("tensorferry", 1),
        ],
        "checks": [
            outcome(lambda: load.check_backend_compatibility("tensorferry")),
            outcome(lambda: load.check_version_compatibility(1)),
        ],
        "refused": [
            outcome(lambda: load.check_backend_compatibility("zarr")),
            outcome(lambda: load.check_version_compatibility(2)),
            outcome(lambda: load.check_version_compatibility("1")),
            outcome(lambda: ours.save({}, ".", object())),
            outcome(lambda: ours.save({}, ".", async_sharded_save=True, async_strategy="sync"))
            if own
            else "strategies: nvrx, mcore",
        ],
    }


def test_every_interface_is_there_by_its_name(host):
    (found,) = host.job(1).run(look)
    assert found["elsewhere"] == []
    assert found["common"] == ({"a": 1}, {"a": 1})
    assert "which is not on the allow-list" in found["unsafe"]
    assert found["actions"] == ["load_common", "load_sharded", "save_common", "save_sharded"]
    assert found["registered"] == [True, True]
    assert found["unknown"].startswith("Cannot find a default strategy for: ('load_sharded', \"nobody's\", 1)")
    assert found["kinds"] == [True] * 9
    assert found["checks"] == ["nothing was raised"] * 2
    for text, wanted in zip(
        found["refused"],
        (
            "of backend 'zarr'",
            "version 2 of the format",
            "version '1'",
            "pass what save_strategy() returns",
            "strategies: nvrx, mcore",
        ),
        strict=True,
    ):
        assert wanted in text
        assert not text.startswith("another exception"), text
