"""Megatron's own wrappers, which save and load in parallel, around the strategies of this door."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from unittest import mock

import pytest
import torch
from placed import Job, Placement, digest, expected, sharded_state
from test_errors import outcome

pytestmark = pytest.mark.process


#: The time-out of a process group in which a rank does not take part.
GROUP_S = 4


@contextlib.contextmanager
def without_gpu(how="on the host"):
    """Megatron's wrappers make their tensors on a GPU: here in host memory, or nowhere."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    init, empty = ShardedTensor.init_data, torch.empty

    def on_host(make):
        def made(*args, **options):
            if str(options.get("device", "")).startswith("cuda"):
                if how == "not at all":
                    raise RuntimeError("no GPU today")
                options["device"] = "cpu"
            return make(*args, **options)

        return made

    with contextlib.ExitStack() as stack:
        for place, name, replaced in (
            (torch, "empty", on_host(torch.empty)),
            (torch, "empty_like", on_host(torch.empty_like)),
            (torch.Tensor, "cuda", lambda self, *_, **__: self),
            (ShardedTensor, "init_data", lambda self, _, init_fn=empty: init(self, "cpu", init_fn)),
        ):
            stack.enter_context(mock.patch.object(place, name, replaced))
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


def test_their_wrappers_save_and_load_with_our_strategies(host, tmp_path):
    for sizes in ((1, 1, 2), (2, 1, 2)):
        folder = tmp_path / str(sizes)
        for name in ("stock", "unnamed", "ours", "background"):
            (folder / name).mkdir(parents=True)
        for found, wanted in host.job(math.prod(sizes)).run(save_and_load, str(folder), sizes):
            assert len(found) == 8
            for how, state in found.items():
                assert state == wanted, how


def save_in_turn(kept, folder):
    import megatron.core.dist_checkpointing as stock

    import tensorferry.megatron as ours

    del kept
    place, found, wanted = Placement(1, 1, 2), [], []
    # It decides once which rank saves what.
    save = wrappers()[0](do_cache_distribution=True)
    with without_gpu():
        for value, dtype in enumerate((torch.float32, torch.bfloat16)):
            at = f"{folder}/{value}"
            stock.save(sharded_state(place, dtype, value), at, save, validate_access_integrity=False)
            found.append(digest(ours.load(sharded_state(place, dtype, empty=True), at)))
            wanted.append(expected(place, dtype, value))
    return found, wanted


def test_a_distribution_that_is_kept_says_nothing_of_what_is_saved(host, tmp_path):
    for name in "01":
        (tmp_path / name).mkdir()
    for found, wanted in host.job(2).run(save_in_turn, str(tmp_path)):
        assert found == wanted


def fail_alone(kept, folder):
    import tensorferry.megatron as ours

    del kept
    place = Placement(1, 1, 2)
    _, load = wrappers()
    ours.save(sharded_state(place), folder)
    how = "not at all" if torch.distributed.get_rank() == 1 else "on the host"
    with without_gpu(how):
        return outcome(lambda: ours.load(sharded_state(place, empty=True), folder, load("broadcast")))


def test_a_wrapper_that_fails_on_one_rank_ends_with_the_time_out_of_the_process_group(host, tmp_path):
    job = Job(host, 2, GROUP_S)
    try:
        first, second = job.run(fail_alone, str(tmp_path))
    finally:
        job.kill()
    assert re.match(r"cannot load .*: FullyParallelLoadStrategyWrapper has failed .*RuntimeError: no GPU today", second)
    assert re.match(r"cannot load .*: FullyParallelLoadStrategyWrapper has failed .*Timed out", first)
