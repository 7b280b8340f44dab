"""No rank waits for ever for one that has raised an error elsewhere, does something else, or has died."""

from __future__ import annotations

import contextlib
import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
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
        from tensorferry.megatron import together

        together._RELEASE, kept = "99.0", together._RELEASE
        try:
            return outcome(lambda: ours.load(state(rank, world), folder))
        finally:
            together._RELEASE = kept
    return outcome(lambda: ours.load(state(rank, world), folder, strategy))


def interrupt(kept, folder):
    import tensorferry.megatron as ours

    del kept
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    class Interrupts:
        def __reduce__(self):
            raise KeyboardInterrupt

    from megatron.core.dist_checkpointing.mapping import ShardedObject

    with_object = state(rank, world) | {"o": ShardedObject("o", Interrupts() if rank else 1, (world,), (rank,))}
    try:
        return outcome(lambda: ours.save(with_object, folder))
    except KeyboardInterrupt:
        return "interrupted"


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


def test_ctrl_c_on_one_rank_is_told_to_the_others(host, tmp_path):
    first, second = host.job(2).run(interrupt, str(tmp_path))
    assert "KeyboardInterrupt" in first
    assert "(rank 1)" in first
    assert "KeyboardInterrupt" in second


def interrupt_between(kept, folder, where):
    """Interrupts rank 1 between two steps of a save, or in the middle of what two-stage ranks do together.

    Or rank 1 finds that the ranks have lost contact, while another one of its group waits for it.
    """
    from importlib import import_module
    from unittest import mock

    import tensorferry.megatron as ours
    from tensorferry.megatron import spreading, two_stage

    # The package has a function of this name.
    saving = import_module("tensorferry.megatron.save")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    place, name = (saving, "_Saving") if where == "save" else (spreading.Exchange, "_serve")
    does = KeyboardInterrupt
    if where == "its group":
        place, name = two_stage.TwoStageDataParallelLoadShardedStrategy, "_shared_index"

        def does(ranks, _):
            ranks._break("KeyboardInterrupt on rank 1")
            raise KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        if rank == 1:
            stack.enter_context(mock.patch.object(place, name, side_effect=does))
        if where == "save":
            return outcome(lambda: ours.save(state(rank, world), folder))
        groups = kept.setdefault("groups", [torch.distributed.new_group(members) for members in ((0, 1), (2, 3))])
        strategy = ours.TwoStageDataParallelLoadShardedStrategy(
            groups[rank // 2], spread=True, interface="127.0.0.1", timeout=timedelta(seconds=10)
        )
        replicas = {name: tensor(name, 0, 1, 4 * world, replica_id=rank) for name in ("w", "v")}
        return outcome(lambda: ours.load(replicas, folder, strategy))


def test_ctrl_c_anywhere_ends_the_wait_of_the_others(host, tmp_path):
    host.job(4).run(save, str(tmp_path))
    for where in ("two-stage", "save"):
        told = host.job(4).run(interrupt_between, str(tmp_path), where)
        assert re.match("another exception: .*KeyboardInterrupt", told.pop(1), re.DOTALL)
        for text in told:
            assert re.match(r"cannot (load|write) .*KeyboardInterrupt.*rank 1", text), (where, text)
        if where == "two-stage":
            # All were told in time: they go on.
            host.job(4).run(save, str(tmp_path))
    # Nobody knows which collectives were half done.
    host.job(4).kill()
    host.job(4).run(save, str(tmp_path))
    told = host.job(4).run(interrupt_between, str(tmp_path), "its group")
    host.job(4).kill()
    assert "KeyboardInterrupt" in told.pop(1)
    for text in told:
        assert re.match(r"cannot load .*KeyboardInterrupt on rank 1", text), text


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


def load_piped(kept, folder):
    import tensorferry.megatron as ours

    del kept
    return outcome(lambda: ours.load(state(0, 2), folder)), outcome(lambda: ours.load_common_state_dict(folder))


@pytest.mark.parametrize("name", ["common.pt", "metadata.json"])
def test_a_pipe_in_place_of_a_file_makes_no_rank_wait(host, tmp_path, name):
    host.job(2).run(save, str(tmp_path))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    for texts in host.job(2).run(load_piped, str(tmp_path)):
        assert all(f"{name} is not a regular file" in text for text in texts[: 2 if name == "common.pt" else 1]), texts
    assert Path(tmp_path / name).is_fifo()
