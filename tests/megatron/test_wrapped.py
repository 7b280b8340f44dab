"""Megatron's own wrappers, which save and load in parallel, around the strategies of this door."""

from __future__ import annotations

import contextlib
import inspect
import math
from unittest import mock

import pytest
import torch
from placed import Placement, digest, expected, sharded_state

pytestmark = pytest.mark.process


@contextlib.contextmanager
def without_gpu():
    """Megatron's wrappers make their tensors on a GPU: here in host memory."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    init, empty = ShardedTensor.init_data, torch.empty

    def on_host(make):
        def made(*args, **options):
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return make(*args, **options)

        return made

    with (
        mock.patch.object(torch, "empty", on_host(torch.empty)),
        mock.patch.object(torch, "empty_like", on_host(torch.empty_like)),
        mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self),
        mock.patch.object(ShardedTensor, "init_data", lambda self, _, init_fn=empty: init(self, "cpu", init_fn)),
    ):
        yield


def wrappers():
    import megatron.core.dist_checkpointing.strategies.fully_parallel as theirs

    import tensorferry.megatron as ours

    saves = theirs.FullyParallelSaveStrategyWrapper
    named = {"backend": "tensorferry"} if "backend" in inspect.signature(saves).parameters else {}
    everyone = torch.distributed.group.WORLD
    return (
        lambda is_named=True, **options: saves(
            ours.save_strategy(), everyone, **options, **(named if is_named else {})
        ),
        lambda how: theirs.FullyParallelLoadStrategyWrapper(ours.load_strategy(), everyone, exchange_algo=how),
    )


def save_and_load(kept, folder, sizes):
    import megatron.core.dist_checkpointing as stock

    import tensorferry.megatron as ours

    del kept
    place = Placement(*sizes)
    save, load = wrappers()
    found = {}
    with without_gpu():
        stock.save(sharded_state(place, value=1), f"{folder}/stock", save())
        # Since 0.17 its metadata.json says torch_dist.
        stock.save(sharded_state(place, value=1), f"{folder}/unnamed", save(False))
        ours.save(sharded_state(place, value=1), f"{folder}/ours", save())
        request = ours.save(sharded_state(place, value=1), f"{folder}/background", save(), async_sharded_save=True)
        request.execute_sync()
        for name in ("stock", "unnamed", "ours", "background"):
            found[name] = digest(ours.load(sharded_state(place, empty=True), f"{folder}/{name}"))
        for how in ("broadcast", "gather_object"):
            for module in (stock, ours):
                state = module.load(sharded_state(place, empty=True), f"{folder}/stock", load(how))
                found[how, module.__name__] = digest(state)
    return found, expected(place, value=1)


def test_their_wrappers_save_and_load_with_our_strategies(each_host, tmp_path):
    for sizes in ((1, 1, 2), (2, 1, 2)):
        folder = tmp_path / str(sizes)
        for name in ("stock", "unnamed", "ours", "background"):
            (folder / name).mkdir(parents=True)
        for found, wanted in each_host.job(math.prod(sizes)).run(save_and_load, str(folder), sizes):
            assert len(found) == 8
            for how, state in found.items():
                assert state == wanted, how
