"""Tensors that are spread over ranks in any way come back as they were, by every door, or are refused."""

from __future__ import annotations

import inspect
import random
import re
from typing import TYPE_CHECKING

import pytest
import spread_states
import torch
import torch.distributed.checkpoint as dcp
from job import Job

from tensorferry import cli
from tensorferry.checkpointing import SyncCheckpointer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(300), pytest.mark.process]

DOORS = ["sync", "files", "async", "peers", "torch", "states", "files planned"]
#: The doors whose parts are planned by torch.
OF_TORCH = {"files", "files planned", "peers", "torch"}


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[int, Job]]:
    """Jobs of one to four ranks."""
    made = {world: Job(world) for world in range(1, 5)}
    yield made
    for job in made.values():
        job.end()


def saved(job: Job, door: str, spreads: dict, folder: Path) -> tuple[str, list[str]]:
    """Returns where a state was saved, and the errors of the ranks."""
    found = job.run(spread_states.save, door, spreads, str(folder))
    metadata = [one for one, _ in found]
    if door == "states":
        return " ".join(["tensorferry-dcp/1 1", *metadata]), [error for _, error in found]
    return metadata[0] or str(folder), [error for _, error in found]


def test_random(jobs, tmp_path, request):
    for seed in range(request.config.getoption("--spread-states")):
        rng = random.Random(-seed - 1)
        door, saving, loading = DOORS[seed % len(DOORS)], rng.randint(1, 4), rng.randint(1, 4)
        spreads, asked = spread_states.random_states(seed, saving, loading)
        if door in OF_TORCH and seed % 4:
            spreads = {name: spread for name, spread in spreads.items() if spread.is_seen_by_torch}
            asked = {name: asked[name] for name in spreads}
        where, errors = saved(jobs[saving], door, spreads, tmp_path / str(seed))
        about = seed, door, saving, loading, spreads, asked
        if door in OF_TORCH and any(errors):
            # torch's planner takes a part with gaps for one box, and an empty part for the one that begins there.
            assert all(re.search("Failed to validate global plan|cannot be a part", error) for error in errors), about
            assert not all(spread.is_seen_by_torch for spread in spreads.values()), (about, errors)
            continue
        assert not any(errors), (about, errors)
        for error, differing in jobs[loading].run(spread_states.load, door, asked, where):
            assert (error, differing) == ("", []), about
        jobs[saving].run(spread_states.end)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::UserWarning")
@pytest.mark.parametrize("door", ["sync", "files"])
def test_random_made_whole_without_ranks(jobs, tmp_path, door):
    for seed in range(2000, 2008):
        spreads, _ = spread_states.random_states(seed, 3, 1)
        if door == "files":
            spreads = {name: spread for name, spread in spreads.items() if spread.is_seen_by_torch}
        where, errors = saved(jobs[3], door, spreads, tmp_path / str(seed))
        assert not any(errors), (seed, errors)
        assert cli.main(["convert", where, str(tmp_path / f"{seed}.pt")]) == 0
        states = [torch.load(tmp_path / f"{seed}.pt"), *([SyncCheckpointer().load(where)] if door == "sync" else [])]
        for state in states:
            for name, spread in spreads.items():
                assert torch.equal(state[name], spread_states.whole(name, spread)), (seed, name, spread)


@pytest.mark.parametrize(
    ("kind", "world", "reason"),
    [
        ("partial", 2, "w cannot be a part of a checkpoint: on rank 0, it is Partial"),
        ("uneven", 2, r"on rank 0, its part on this rank has the shape \[7, 2\], and .* give it \[6, 2\]"),
        ("lacking", 3, r"w cannot .*: 16 of the 24 elements .* in rank 0, rank 2 \(without it: rank 1\)"),
        ("experts", 4, r"w cannot .*: ranks 0 and 2, .* have different values of \[0:6, 0:2\]"),
        ("two kinds", 4, "w is spread over ranks on rank 0, and a tensor of its own on rank 2"),
        ("two shapes", 4, r"ranks 0 and 2 have different tensors at w: int64 \[12, 2\] and int64 \[6, 2\]"),
        ("overlap", 4, r"w cannot .*: rank 0 has \[0:6, 0:2\], rank 2 has \[0:12, 0:2\], and they overlap"),
    ],
)
def test_a_save_whose_parts_make_up_no_whole_is_refused_by_all_ranks(jobs, tmp_path, kind, world, reason):
    _, errors = saved(jobs[world], "sync", kind, tmp_path / "c")
    for error in errors:
        assert re.search(reason, error), error
    assert not list(tmp_path.rglob("index.safetensors"))


def test_one_value_on_several_meshes_is_one_tensor(jobs, tmp_path):
    for door in DOORS:
        where, errors = saved(jobs[4], door, "twice", tmp_path / door)
        assert not any(errors), (door, errors)
        for kind, world in (("twice", 4), ("rows", 3), ("whole", 1)):
            assert jobs[world].run(spread_states.load, door, kind, where) == [("", [])] * world, (door, kind)
        jobs[4].run(spread_states.end)


@pytest.mark.parametrize("door", ["files", "peers"])
def test_a_tensor_of_several_shards_on_each_rank_is_saved_and_loaded_by_shard(jobs, tmp_path, door):
    for saving in ("wrapper", "rows"):
        where, errors = saved(jobs[2], door, saving, tmp_path / saving)
        assert not any(errors), errors
        for kind, world in (("wrapper", 2), ("wrapper", 3), ("rows", 2), ("whole", 1)):
            assert jobs[world].run(spread_states.load, door, kind, where) == [("", [])] * world, (saving, kind)
        jobs[2].run(spread_states.end)


def test_two_values_under_one_key_are_not_mixed_by_a_reader_of_states(jobs, tmp_path):
    where, _ = saved(jobs[4], "states", "experts", tmp_path)
    for kind, world in (("experts", 4), ("whole", 1)):
        for error, changed in jobs[world].run(spread_states.load, "states", kind, where):
            assert "ranks 0 and 2, which are not of one mesh, have different values" in error, error
            assert not changed
    jobs[4].run(spread_states.end)


def test_keys_that_only_some_ranks_have_are_loaded_by_any_number_of_ranks(jobs, tmp_path):
    where, errors = saved(jobs[4], "sync", "stages", tmp_path / "c")
    assert not any(errors), errors
    asked = {f"stage {n}": {"w": torch.zeros(12, 2, dtype=torch.int64)} for n in range(2)}
    SyncCheckpointer(rank=0, world_size=1).load(where, asked, strict=True)
    for number in range(2):
        assert torch.equal(asked[f"stage {number}"]["w"], (torch.arange(24).reshape(12, 2) + 2) * (number + 1))


@pytest.mark.parametrize("door", ["sync", "files", "peers", "states"])
@pytest.mark.parametrize("kind", ["partial", "uneven"])
def test_a_target_whose_part_has_no_place_is_refused_before_anything_is_written(jobs, tmp_path, kind, door):
    where, errors = saved(jobs[2], door, "rows", tmp_path / "c")
    assert not any(errors), errors
    for error, changed in jobs[2].run(spread_states.load, door, kind, where):
        # torch's planner says no more than that it cannot load such a tensor.
        reason = "its part on this rank has the shape" if kind == "uneven" else "w: it is Partial|metadata for w"
        assert re.search(reason, error), error
        assert not changed
    jobs[2].run(spread_states.end)


HAS_ALONE = "use_collectives" in inspect.signature(dcp.save).parameters


@pytest.mark.skipif(not HAS_ALONE, reason="this torch always coordinates")
def test_ranks_that_serve_alone_serve_what_they_have_and_nothing_else(jobs, tmp_path):
    found = jobs[2].run(spread_states.save, "peers alone", "rows", str(tmp_path / "c"))
    assert [error for _, error in found] == ["", ""]
    for metadata, _ in found:
        (one,) = jobs[1].run(spread_states.load, "peers alone", "whole", metadata)
        assert re.search(r"nothing was overwritten: w: the checkpoint has 12 of the 24 elements", one[0]), one
        assert not one[1]
    jobs[2].run(spread_states.end)


@pytest.mark.skipif(not HAS_ALONE, reason="this torch always coordinates")
def test_a_save_without_collectives_is_loaded_by_any_number_of_ranks_or_refused_by_all(jobs, tmp_path):
    for seed in range(3000, 3004):
        spreads, asked = spread_states.random_states(seed, 3, 2)
        spreads = {name: spread for name, spread in spreads.items() if spread.is_seen_by_torch}
        where, errors = saved(jobs[3], "files alone", spreads, tmp_path / str(seed))
        assert not any(errors), (seed, errors)
        asked = {name: asked[name] for name in spreads}
        for world, states in ((3, spreads), (2, asked)):
            for error, differing in jobs[world].run(spread_states.load, "files alone", states, where):
                assert (error, differing) == ("", []), (seed, world)
    for kind, reason in (("lacking", "w cannot be a part of a checkpoint: 16 of the 24"), ("raising", "no such thing")):
        _, errors = saved(jobs[3], "files alone", kind, tmp_path / kind)
        assert all(reason in error for error in errors), errors
        assert ["RankFailed" in error for error in errors].count(True) == 2
        assert not (tmp_path / kind / "index.safetensors").exists()


@pytest.mark.parametrize("door", ["sync", *(["files alone"] if HAS_ALONE else [])])
def test_a_rank_that_never_comes_is_named_within_the_time_out_of_the_group(jobs, tmp_path, door):
    first, absent, last = jobs[3].run(spread_states.wait_for_one, door, str(tmp_path / "c"))
    for error in (first, last):
        assert re.search(r"rank 1 did not come within 1 s", error), error
    assert absent == ""
    assert not list(tmp_path.rglob("index.safetensors"))
