"""Each shard that a group needs is read from storage once, and the ranks give it to each other."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.process


ROWS, COLUMNS, TENSORS = 8192, 512, 6


def large(rank, world, number, data, **options):
    from megatron.core.dist_checkpointing import ShardedTensor

    if world:
        return ShardedTensor.from_rank_offsets(f"w{number}", data, (0, rank, world), **options)
    return ShardedTensor.from_rank_offsets(f"w{number}", data, replica_id=rank, **options)


def save_large(kept, folder):
    import tensorferry.megatron as ours

    del kept
    rank = torch.distributed.get_rank()
    half = ROWS // 2
    data = torch.arange(half * COLUMNS, dtype=torch.float32).reshape(half, COLUMNS) + rank
    ours.save({str(number): large(rank, 2, number, data * (number + 1)) for number in range(TENSORS)}, folder)


def load_large(kept, folder, metadata, *failing):
    """Loads all tensors on all ranks, of which one has only a part of the last tensor, and each its own of another."""
    from unittest import mock

    import tensorferry.megatron as ours
    from tensorferry.storage.divided import DividedSource

    del kept
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state = {}
    for number in range(TENSORS - 1):
        data = torch.zeros(ROWS, COLUMNS)
        # One of them in another dtype, one not in one piece, and one that only some have in one piece.
        if number == 0:
            data = data.half()
        elif number == 1 or (number == 2 and rank % 2):
            data = torch.zeros(COLUMNS, ROWS).T
        state[str(number)] = large(rank, None, number, data)
    # As those of a distributed optimizer, of which each rank has its own part.
    own = ROWS // world
    state["own"] = large(rank, world, TENSORS - 1, torch.zeros(own, COLUMNS))
    strategy = ours.TwoStageDataParallelLoadShardedStrategy(
        torch.distributed.group.WORLD, interface="127.0.0.1", peers=metadata
    )
    fails = {"side_effect": ConnectionError("no server today")} if rank in failing else {"wraps": DividedSource}
    with mock.patch("tensorferry.megatron.two_stage.DividedSource", **fails):
        try:
            found = ours.load(state, folder, strategy)
        except Exception as e:
            return str(e), {}
    half = torch.arange(ROWS // 2 * COLUMNS, dtype=torch.float32).reshape(ROWS // 2, COLUMNS)
    whole = torch.cat([half, half + 1])
    right = [torch.equal(found[str(n)], (whole * (n + 1)).to(found[str(n)].dtype)) for n in range(TENSORS - 1)]
    right.append(torch.equal(found["own"], (whole * TENSORS)[rank * own : (rank + 1) * own]))
    # autograd knows that they were written to.
    return [*right, bool(found["3"]._version)], strategy.report


def publish(kept):
    import tensorferry.megatron as ours
    from tensorferry.dcp import PeerWriter

    kept["writer"] = PeerWriter(interface="127.0.0.1")
    rank, half = torch.distributed.get_rank(), ROWS // 2
    data = torch.arange(half * COLUMNS, dtype=torch.float32).reshape(half, COLUMNS) + rank
    kept["state"] = {str(number): large(rank, 2, number, data * (number + 1)) for number in range(TENSORS)}
    return ours.publish(kept["state"], kept["writer"])


def close(kept):
    kept.pop("writer").shutdown()


def test_what_all_ranks_need_is_read_once_from_a_folder_and_from_peers(host, tmp_path):
    host.job(2).run(save_large, str(tmp_path))
    size = ROWS * COLUMNS * 4
    for metadata in (None, host.job(2).run(publish)[0]):
        told = host.job(4).run(load_large, str(tmp_path), metadata)
        assert [right for right, _ in told] == [[True] * (TENSORS + 1)] * 4
        relayed = sum(report["relayed"] for _, report in told)
        read = sum(report["bytes"] for _, report in told)
        # What lies in one piece and has its dtype everywhere is divided; the other three are read by each rank.
        assert relayed >= 3 * 2 * size
        assert read < (2 + 1 + 3 * 4) * size * 1.05
    host.job(2).run(close)


def test_a_rank_that_fails_while_the_others_share_ends_the_load_of_all(host, tmp_path):
    host.job(2).run(save_large, str(tmp_path))
    for text, _ in host.job(4).run(load_large, str(tmp_path), None, 2):
        assert "no server today (rank 2)" in text
