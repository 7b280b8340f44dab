"""Each shard that a group needs is read from storage once, and the ranks fetch it from each other."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from placed import Placement, digest, expected, sharded_state

from tensorferry.storage.boxes import Box

pytestmark = pytest.mark.process


def save(kept, folder, sizes, dtype):
    import tensorferry.megatron as ours

    kept["place"] = Placement(*sizes)
    ours.save(sharded_state(kept["place"], dtype), folder)


def load(kept, folder, sizes, dtype):
    import tensorferry.megatron as ours

    place = Placement(*sizes)
    group = kept.setdefault(sizes, place.group())
    strategy = ours.TwoStageDataParallelLoadShardedStrategy(group, spread=True, interface="127.0.0.1")
    found = digest(ours.load(sharded_state(place, dtype, empty=True), folder, strategy))
    return found, expected(place, dtype), strategy.report


def test_every_placement_is_loaded_as_without_it(host, tmp_path):
    for number, sizes in enumerate(((1, 1, 4), (2, 1, 2))):
        for dtype in (torch.float32, torch.float8_e4m3fn)[: 2 - number]:
            folder = tmp_path / f"{number}-{dtype}"
            folder.mkdir()
            host.job(2).run(save, str(folder), (2, 1, 1), dtype)
            told = host.job(4).run(load, str(folder), sizes, dtype)
            for found, wanted, _ in told:
                assert found == wanted


TEXT = 500_000


def save_large(kept, folder):
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    import tensorferry.megatron as ours

    del kept
    rank = torch.distributed.get_rank()
    state = {}
    for number in range(8):
        data = torch.arange(1 << 19, dtype=torch.float32).reshape(1024, 512) * (number + 1) + rank
        state[str(number)] = ShardedTensor.from_rank_offsets(f"w{number}", data, (0, rank, 2))
    state["text"] = ShardedObject("text", "x" * TEXT, (1,), (0,), replica_id=rank)
    ours.save(state, folder)


def load_large(kept, folder, wraps, **options):
    from unittest import mock

    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    import tensorferry.megatron as ours
    from tensorferry.megatron import common
    from tensorferry.storage import commits

    del kept
    rank = torch.distributed.get_rank()
    state = {}
    for number in range(8):
        data = torch.zeros(2048, 512)
        # Two of them in another dtype, one not in one piece.
        if number < 2:
            data = data.half()
        elif number == 2:
            data = torch.zeros(512, 2048).T
        state[str(number)] = ShardedTensor.from_rank_offsets(f"w{number}", data, replica_id=rank)
    strategy = ours.load_strategy()
    if wraps:
        strategy = ours.TwoStageDataParallelLoadShardedStrategy(
            torch.distributed.group.WORLD, interface="127.0.0.1", **options
        )
    state["text"] = ShardedObject("text", None, (1,), (0,), replica_id=rank)
    with (
        mock.patch.object(commits, "read", wraps=commits.read) as index,
        mock.patch.object(common, "read", wraps=common.read) as common_part,
    ):
        found = ours.load(state, folder, strategy)
    assert found.pop("text") == "x" * TEXT
    whole = torch.cat([torch.arange(1 << 19, dtype=torch.float32).reshape(1024, 512)] * 2)
    first = torch.arange(2048)[:, None] // 1024
    wanted = [(whole * (number + 1) + first).to(found[str(number)].dtype) for number in range(8)]
    right = [torch.equal(found[str(number)], one) for number, one in enumerate(wanted)]
    # autograd knows that they were written to.
    assert all(found[str(number)]._version for number in range(8))
    return right, strategy.report | {"index": index.call_count, "common": common_part.call_count}


def load_spread(kept, folder, wraps):
    return load_large(kept, folder, wraps, spread=True)


def test_every_byte_is_read_from_storage_once(host, tmp_path):
    host.job(2).run(save_large, str(tmp_path))
    size = 8 * 2 * (2 << 20)
    alone = host.job(4).run(load_large, str(tmp_path), False)
    assert [right for right, _ in alone] == [[True] * 8] * 4
    assert sum(report["wanted"] for _, report in alone) >= 4 * size
    shared = host.job(4).run(load_spread, str(tmp_path), True)
    assert [right for right, _ in shared] == [[True] * 8] * 4
    # The common state, too, which one rank compares with common.pt.
    assert size + TEXT <= sum(report["wanted"] for _, report in shared) < size + TEXT + 10_000
    assert sum(report["bytes"] for _, report in shared) < 1.02 * (size + TEXT) + 100_000
    assert [report["index"] for _, report in alone] == [1] * 4
    assert [report["index"] for _, report in shared] == [1, 0, 0, 0]
    assert [bool(report["common"]) for _, report in shared] == [True, False, False, False]
    # Two of the eight tensors are half as large in their targets, and are fetched as they are there.
    assert sum(report["fetched"] for _, report in shared) >= 3 * (size - size // 8)


def choose(kept, folder, held, apart, **options):
    from unittest import mock

    from tensorferry.megatron import page_cache

    # As if the first rank's machine had, or said, something else than the others.
    is_first = torch.distributed.get_rank() == 0
    real = page_cache.cache_of

    def cache_of(folder):
        boot, *inode = real(folder)
        return (boot + str(is_first and apart), *inode)

    with (
        mock.patch.object(page_cache, "holds", return_value=held if is_first else True),
        mock.patch.object(page_cache, "cache_of", cache_of),
    ):
        return load_large(kept, folder, True, **options)


def choose_alone(kept, folder):
    return choose(kept, folder, None, True, spread=False)


def test_ranks_read_alone_what_is_not_taken_from_storage_twice(host, tmp_path):
    host.job(2).run(save_large, str(tmp_path))
    # In memory everywhere; not in memory, of one machine or of two; on a file system that does not tell.
    for held, apart, spreads in ((True, True, False), (False, False, False), (False, True, True), (None, False, True)):
        told = host.job(2).run(choose, str(tmp_path), held, apart)
        assert [right for right, _ in told] == [[True] * 8] * 2
        assert [report["fetched"] > 0 for _, report in told] == [spreads] * 2, (held, apart)
    told = host.job(2).run(choose_alone, str(tmp_path))
    assert [(right, report["fetched"]) for right, report in told] == [([True] * 8, 0)] * 2


def look_at_the_page_cache(kept, folder):
    from tensorferry.megatron import page_cache

    del kept
    path = Path(folder) / "file"
    with path.open("wb") as file:
        file.write(bytes(8 << 20))
        os.fsync(file.fileno())
        held = page_cache.holds([path])
        # The system keeps pages that another processor has in hand, and drops them when it is asked again.
        for _ in range(100):
            os.posix_fadvise(file.fileno(), 4 << 20, 0, os.POSIX_FADV_DONTNEED)
            if not (dropped := page_cache.holds([path])):
                break
            time.sleep(0.05)
    os.mkfifo(path.with_name("pipe"))
    others = [page_cache.holds([path.with_name(name)]) for name in ("pipe", "none")]
    places = [page_cache.cache_of(Path(name)) for name in (folder, folder, "/proc", f"{folder}/none", f"{folder}/none")]
    return held, dropped, others, [places.index(place) for place in places]


def test_the_page_cache_is_asked_for_samples(host, tmp_path):
    ((held, dropped, others, places),) = host.job(1).run(look_at_the_page_cache, str(tmp_path))
    assert others == [False, None]
    assert places == [0, 0, 2, 3, 4]
    if held is None:
        pytest.skip("this file system has no reads that do not wait")
    assert held
    assert dropped is False


def load_padded(kept, folder):
    from megatron.core.dist_checkpointing import ShardedTensor

    import tensorferry.megatron as ours
    from tensorferry.megatron import spreading

    del kept
    rank = torch.distributed.get_rank()
    state = {}
    for number in range(8):
        # The checkpoint has 2048 rows of 512. Strided targets pass through memory that several turns use, the larger
        # ones first.
        data = torch.full((640, 1024) if number % 2 else (512, 2048), -1.0).T
        state[str(number)] = ShardedTensor.from_rank_offsets(
            f"w{number}", data, replica_id=rank, allow_shape_mismatch=True
        )
    strategy = ours.TwoStageDataParallelLoadShardedStrategy(
        torch.distributed.group.WORLD, spread=True, interface="127.0.0.1"
    )
    window, spreading._WINDOW = spreading._WINDOW, spreading._BATCH + (6 << 20)
    found = ours.load(state, folder, strategy)
    spreading._WINDOW = window
    return [bool((found[str(number)][:, 512:] == 0).all() and found[str(number)][1, 1] > 0) for number in range(8)]


def test_what_the_checkpoint_does_not_have_is_zero_whatever_was_loaded_before(host, tmp_path):
    host.job(2).run(save_large, str(tmp_path))
    assert host.job(2).run(load_padded, str(tmp_path)) == [[True] * 8] * 2


def load_damaged(kept, folder):
    from test_errors import outcome

    import tensorferry.megatron as ours

    del kept
    place = Placement(1, 1, 4)
    strategy = ours.TwoStageDataParallelLoadShardedStrategy(
        torch.distributed.group.WORLD, spread=True, interface="127.0.0.1"
    )
    return outcome(lambda: ours.load(sharded_state(place, empty=True), folder, strategy))


def test_damage_that_one_rank_finds_ends_the_load_of_all(host, tmp_path):
    host.job(2).run(save, str(tmp_path), (2, 1, 1), torch.float32)
    (rank,) = tmp_path.glob("rank00001-*")
    data = bytearray(rank.read_bytes())
    for at in range(4096, len(data), 512):
        data[at] ^= 1
    rank.write_bytes(data)
    for text in host.job(4).run(load_damaged, str(tmp_path)):
        assert "does not match" in text


def plan(kept):
    from tensorferry.megatron import spreading

    del kept
    size = 100 << 20
    # The first four do not lie in one piece on the second rank, the last one is needed by one rank only.
    needs = [{("w", i): spreading.Need(size, rank == 0 or i >= 4) for i in range(8)} for rank in range(2)]
    needs[0]["alone", 0] = spreading.Need(3 * size, True)
    made = spreading.Plan(needs)
    held = [
        sum(size for of_rank in turn.values() for shard in of_rank if not needs[1][shard].direct) for turn in made.turns
    ]
    read = [sum(len(turn.get(rank, ())) for turn in made.turns) for rank in range(2)]
    return max(held) <= spreading._WINDOW, len(made.turns), read, ("alone", 0) in made.shared


def test_the_plan_bounds_temporary_memory_and_spreads_the_reading(host):
    # What the first rank reads alone is as much as three shards: the second one takes more of the shared ones.
    assert host.job(1).run(plan) == [(True, 2, [3, 5], False)]


def pieces(kept):
    from tensorferry.megatron import spreading
    from tensorferry.megatron.loading import ChunkPart

    del kept
    rows = 3 * spreading._BATCH // 4096 + 5
    target = torch.empty(1, rows, 1024)
    parts = [
        ChunkPart(0, "w", (0, at, 0), (0, 0, 0), Box((0, at, 0), (1, length, 1024)))
        for at, length in ((7, rows - 7), (0, 7))
    ]
    inside = list(spreading._in_order(parts, target.shape, 4))
    columns = [ChunkPart(0, "w", (0, 0, at), (0, 0, 0), Box((0, 0, at), (1, rows, 512))) for at in (0, 512)]
    across = list(spreading._in_order(columns, target.shape, 4))
    whole = [sum(part.wanted.numel for part, _ in found) == target.numel() for found in (inside, across)]
    small = all(part.wanted.numel * 4 <= spreading._BATCH for part, _ in [*inside, *across])
    there = [upto for _, upto in inside]
    ends = [1024 * (part.wanted.offsets[1] + part.wanted.sizes[1]) for part, _ in inside]
    *before, last = [upto for _, upto in across]
    return whole, small, there == sorted(there) == ends, (set(before), last) == ({0}, target.numel())


def test_a_shard_is_served_as_far_as_its_rows_have_been_read(host):
    assert host.job(1).run(pieces) == [([True, True], True, True, True)]
