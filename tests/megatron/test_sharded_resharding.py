"""Saved with one placement and loaded with another, beside Megatron's own strategy, on every release."""

from __future__ import annotations

import math
import os

import pytest
import torch
from placed import Placement, digest, expected, sharded_state

pytestmark = pytest.mark.process


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64)
#: (tensor, pipeline, data parallel) of the job that saves and of the one that loads, of as many ranks each as they say.
CHANGES = (
    ((2, 1, 2), (1, 2, 1)),
    ((1, 2, 1), (2, 2, 1)),
    ((1, 1, 4), (1, 1, 1)),
    ((1, 1, 1), (1, 4, 1)),
    ((4, 1, 1), (1, 1, 2)),
)
ALL = os.environ.get("TENSORFERRY_MEGATRON_RANKS") == "8"
if ALL:
    CHANGES += (((1, 1, 2), (4, 1, 1)), ((2, 1, 1), (1, 1, 4)))
    CHANGES += (((2, 2, 2), (1, 1, 4)), ((4, 2, 1), (2, 1, 4)), ((1, 2, 2), (8, 1, 1)), ((2, 4, 1), (1, 1, 8)))


def save(kept, folder, sizes, dtype, value, names):
    import megatron.core.dist_checkpointing as stock

    import tensorferry.megatron as ours

    del kept
    place = Placement(*sizes)
    if "stock" in names:
        stock.save(sharded_state(place, dtype, value), f"{folder}/stock")
    if "ours" in names:
        stock.save(sharded_state(place, dtype, value), f"{folder}/ours", ours.save_strategy())
    ours.save(sharded_state(place, dtype, value, gap=True), f"{folder}/entry")


def load(kept, folder, sizes, dtype, value, names):
    import megatron.core.dist_checkpointing as stock

    import tensorferry.megatron as ours

    del kept
    place = Placement(*sizes)
    loads = {
        "stock": lambda: stock.load(sharded_state(place, dtype, empty=True), f"{folder}/stock"),
        "ours": lambda: stock.load(sharded_state(place, dtype, empty=True), f"{folder}/ours", ours.load_strategy()),
        "entry": lambda: ours.load(sharded_state(place, dtype, empty=True), f"{folder}/entry"),
    }
    return {name: digest(loads[name]()) for name in names}, expected(place, dtype, value)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_placement_loads_what_every_other_has_saved(each_host, tmp_path, change):
    before, after = change
    for value, dtype in enumerate(DTYPES if ALL or change == CHANGES[0] else DTYPES[:1]):
        folder = tmp_path / str(value)
        names = ("stock", "ours", "entry")
        for name in names:
            (folder / name).mkdir(parents=True)
        each_host.job(math.prod(before)).run(save, str(folder), before, dtype, value, names)
        for found, wanted in each_host.job(math.prod(after)).run(load, str(folder), after, dtype, value, names):
            for name, loaded in found.items():
                assert loaded == wanted, name
