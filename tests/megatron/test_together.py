"""No rank waits for ever for one that has raised an error elsewhere, does something else, or has died."""

from __future__ import annotations

import contextlib
import re
import time
from datetime import timedelta

import pytest
import torch
from placed import Job
from test_errors import outcome, tensor

pytestmark = pytest.mark.process


#: How long ranks wait for those that never come.
SHORT = timedelta(seconds=1)


def state(rank, world):
    return {name: tensor(name, rank, world) for name in ("w", "v")}


def fail_elsewhere(kept, folder, how):
    import megatron.core.dist_checkpointing as stock

    import tensorferry.megatron as ours

    del kept
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    wrong = state(rank, world)
    if how.startswith("missing") and rank == 1:
        wrong["w"].replica_id = 1
    elif how == "unexpected" and rank == 1:
        wrong["new"] = tensor("new", 0, 1)
    if how == "missing in save":
        text = outcome(lambda: stock.save(wrong, folder, ours.save_strategy(timeout=SHORT)))
    else:
        strict = "raise_unexpected" if how == "unexpected" else "assume_ok_unexpected"
        text = outcome(lambda: stock.load(wrong, folder, ours.load_strategy(timeout=SHORT), strict=strict))
    # The group is as good as before, once all have left.
    torch.distributed.barrier()
    ours.save(state(rank, world), folder)
    return text, ours.load(state(rank, world), folder)["w"].flatten()[0].item()


FAILURES = {"missing in save": 0, "missing": 0, "unexpected": 1}


def save(kept, folder):
    import tensorferry.megatron as ours

    del kept
    ours.save(state(torch.distributed.get_rank(), torch.distributed.get_world_size()), folder)


@pytest.mark.parametrize("how", FAILURES)
def test_what_megatron_finds_on_one_rank_ends_the_wait_of_the_others(host, tmp_path, how):
    host.job(3).run(save, str(tmp_path))
    told = host.job(3).run(fail_elsewhere, str(tmp_path), how)
    assert [value for _, value in told] == [0.0, 1.0, 2.0]
    for rank, (text, _) in enumerate(told):
        if rank == FAILURES[how]:
            assert re.search("Invalid access pattern|Unexpected keys", text)
        else:
            who = FAILURES[how]
            assert re.match(rf"cannot (save|load) .*: rank {who} did not come within 1 s\. If it has raised", text)


def unmatched(kept, folder, how):
    import tensorferry.megatron as ours

    del kept
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    strategy = ours.load_strategy()
    if how == "save and load" and rank == 1:
        return outcome(lambda: ours.save(state(rank, world), folder))
    if how == "strategies" and rank == 1:
        strategy = ours.TwoStageDataParallelLoadShardedStrategy(torch.distributed.group.WORLD, interface="127.0.0.1")
    if how == "versions" and rank == 1:
        from tensorferry.state import together

        together._RELEASE, kept = "99.0", together._RELEASE
        try:
            return outcome(lambda: ours.load(state(rank, world), folder))
        finally:
            together._RELEASE = kept
    return outcome(lambda: ours.load(state(rank, world), folder, strategy))


UNMATCHED = {
    "save and load": r"it is about to save, and rank 0 to load: call one function on all ranks, .* \(rank 1\)",
    "strategies": "load in different ways, LoadStrategy and TwoStage.*: make the same strategy on all ranks",
    "versions": r"it has tensorferry 99.0, and rank 0 has .*: install one on all ranks \(rank 1\)",
}


def test_ranks_that_do_different_things_are_told(host, tmp_path):
    host.job(3).run(save, str(tmp_path))
    for how, text in UNMATCHED.items():
        for one in host.job(3).run(unmatched, str(tmp_path), how):
            assert re.search(text, one), (how, one)


def interrupt_between(kept, folder, where):
    """Interrupts rank 1 between two steps of a save or load, or between those of its group in two-stage loads."""
    from importlib import import_module
    from unittest import mock

    import tensorferry.megatron as ours

    module, name = where
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with contextlib.ExitStack() as stack:
        if rank == 1:
            # The package has functions of these names.
            place = import_module(f"tensorferry.{'state' if module == 'together' else 'megatron'}.{module}")
            real, does = getattr(place, name), KeyboardInterrupt
            if name == "wait":
                # It has said what it had to say in this step, and the others go on.
                def does(*arguments):
                    real(*arguments)
                    raise KeyboardInterrupt

            stack.enter_context(mock.patch.object(place, name, side_effect=does))
        if module in ("save", "together"):
            text = outcome(lambda: ours.save(state(rank, world), folder))
        else:
            groups = kept.setdefault("groups", [torch.distributed.new_group(members) for members in ((0, 1), (2, 3))])
            strategy = ours.TwoStageDataParallelLoadShardedStrategy(groups[rank // 2], interface="127.0.0.1")
            replicas = {name: tensor(name, 0, 1, 4 * world, replica_id=rank) for name in ("w", "v")}
            text = outcome(lambda: ours.load(replicas, folder, strategy))
    # The group is as good as before.
    ours.save(state(rank, world), folder)
    return text, ours.load(state(rank, world), folder)["w"].flatten()[0].item()


def test_ctrl_c_anywhere_ends_the_wait_of_the_others_and_of_no_later_save(host, tmp_path):
    host.job(4).run(save, str(tmp_path))
    for where in (("save", "_Saving"), ("together", "wait"), ("two_stage", "start"), ("two_stage", "Partners")):
        told = host.job(4).run(interrupt_between, str(tmp_path), where)
        assert [value for _, value in told] == [0.0, 1.0, 2.0, 3.0]
        for rank, (text, _) in enumerate(told):
            if rank == 1:
                assert re.match("another exception: .*KeyboardInterrupt", text, re.DOTALL), (where, text)
            else:
                assert re.match(r"cannot (load|save|write|spread) .*KeyboardInterrupt.*rank 1", text), (where, text)


def be_late(kept, folder):
    """Loads in two stages; rank 1 is late among those that read together, as one that is stopped."""
    from unittest import mock

    import tensorferry.megatron as ours
    from tensorferry.megatron import two_stage

    del kept
    rank, start = torch.distributed.get_rank(), two_stage.start

    def start_late(*arguments, **options):
        time.sleep(4 * (rank == 1))
        return start(*arguments, **options)

    strategy = ours.TwoStageDataParallelLoadShardedStrategy(
        torch.distributed.group.WORLD, interface="127.0.0.1", timeout=SHORT
    )
    with mock.patch.object(two_stage, "start", start_late):
        return outcome(lambda: ours.load({"w": tensor("w", 0, 1, 12, replica_id=rank)}, folder, strategy))


def test_a_rank_that_is_late_within_its_group_is_waited_for_as_long_as_the_strategy_says(host, tmp_path):
    host.job(3).run(save, str(tmp_path))
    for text in host.job(3).run(be_late, str(tmp_path))[::2]:
        assert re.search(r"cannot spread .*: rank 1(, 2)? did not come within 1 s\.", text)


def agree(kept, nbytes):
    """Has the ranks tell each other so many bytes in several steps; returns how many keys the store has each time."""
    from torch.distributed.distributed_c10d import _get_default_store

    from tensorferry.megatron.together import Together

    del kept
    counts = []
    for _ in range(4):
        ranks = Together()
        for number in range(3):
            values = ranks.every("agree", lambda said=bytes([number, ranks.rank]): said * (nbytes // 2))
            assert values == [bytes([number, rank]) * (nbytes // 2) for rank in range(ranks.world)]
        torch.distributed.barrier()
        counts.append(_get_default_store().num_keys())
        torch.distributed.barrier()
    return counts


def test_what_ranks_tell_each_other_may_be_long_and_does_not_stay_in_the_store(host):
    job = Job(host, 2, over_tcp=True)
    try:
        # torch's store takes 8 MiB in one value.
        for nbytes in (10 << 20, 10):
            for _, second, third, last in job.run(agree, nbytes):
                assert second == third == last
    finally:
        job.kill()


def finalize_on_some(kept, folder):
    import tensorferry.megatron as ours

    del kept
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    request = ours.save(state(rank, world), folder, ours.save_strategy(timeout=SHORT), async_sharded_save=True)
    job, _, nothing = request.async_fn_args
    request.async_fn(job, request.preload_fn(), nothing)
    text = outcome(lambda: [function() for function in request.finalize_fns]) if rank != 1 else "raised elsewhere"
    torch.distributed.barrier()
    ours.save(state(rank, world), folder)
    return text


def test_a_rank_that_does_not_finish_a_save_in_the_background_ends_the_wait_of_the_others(host, tmp_path):
    first, elsewhere, last = host.job(3).run(finalize_on_some, str(tmp_path))
    assert elsewhere == "raised elsewhere"
    for text in (first, last):
        assert re.match(r"cannot write .*: rank 1 did not come within 1 s\.", text)


def merge_wrong(kept, folder):
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    import tensorferry.megatron as ours

    del kept
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def merge(part):
        if rank == 1:
            raise RuntimeError("no merge today")
        return part

    def build(key, data, replica_id, _):
        del data, replica_id
        return tensor(key, rank, world)

    factory = ShardedTensorFactory("w", torch.zeros(4, 3), build, merge)
    return outcome(lambda: ours.load({"w": factory, "v": tensor("v", rank, world)}, folder))


def save_wrapped(kept, folder):
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    import tensorferry.megatron as ours

    del kept
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    wrong = state(rank, world)
    wrong["w"] = tensor("w", min(rank, world - 2), world)
    wrapped = FullyParallelSaveStrategyWrapper(ours.save_strategy(), torch.distributed.group.WORLD)
    return outcome(lambda: ours.save(wrong, folder, wrapped))


def test_an_error_before_or_after_the_strategy_is_raised_on_every_rank(host, tmp_path):
    host.job(3).run(save, str(tmp_path))
    for text in host.job(3).run(merge_wrong, str(tmp_path)):
        assert re.search(r"RuntimeError: no merge today \(rank 1\)", text)
    for text in host.job(3).run(save_wrapped, str(tmp_path)):
        assert re.search(r"Invalid access pattern for w: .* the shard \[4:8, 0:3\] more than once", text)
