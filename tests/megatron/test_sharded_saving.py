"""Saves in the background, saves that are killed, and what else a checkpoint can be asked."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import re
from pathlib import Path

import pytest
import torch
from placed import Placement, digest, expected, perform, save, sharded_state

pytestmark = pytest.mark.process


PLACE = (1, 1, 2)


def save_async(kept, folder):
    import megatron.core.dist_checkpointing as stock

    import tensorferry.megatron as ours

    del kept
    place = Placement(*PLACE)
    state = sharded_state(place, value=7)
    keep = state["scalar"].data
    at = keep.data_ptr()
    # Releases since 0.19 have two, and the other one needs another package.
    options = {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(stock.save).parameters else {}
    request = stock.save(state, folder, ours.save_strategy(), async_sharded_save=True, **options)
    perform(request, keep)
    assert keep.data_ptr() == at
    return digest(ours.load(sharded_state(place, empty=True), folder)), expected(place, value=7)


def test_a_save_in_a_forked_process_holds_the_state_as_it_was(each_host, tmp_path):
    for found, wanted in each_host.job(2).run(save_async, str(tmp_path)):
        assert found == wanted


def save_by_worker(kept, folders):
    from unittest import mock

    from megatron.core.dist_checkpointing.strategies import async_utils

    import tensorferry.megatron as ours

    del kept
    place = Placement(*PLACE)
    found = []
    # The worker wants a GPU. Forked, it has what is replaced here, and need not import Megatron.
    context = torch.multiprocessing.get_context("fork")
    with (
        mock.patch.object(async_utils.mp, "get_context", return_value=context),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
    ):
        calls = async_utils.AsyncCallsQueue(persistent=True)
        for value, folder in enumerate(folders):
            state = sharded_state(place, value=value)
            keep = state["scalar"].data
            at = keep.data_ptr()
            request = ours.save(state, folder, async_sharded_save=True)
            if value == 1 and torch.distributed.get_rank() == 1:
                # As if the folder were gone, for one save of one rank.
                job, *rest = request.async_fn_args
                job = dataclasses.replace(job, file=dataclasses.replace(job.file, path=Path(folder) / "gone" / "file"))
                request = request._replace(async_fn_args=(job, *rest))
            calls.schedule_async_request(request)
            # From here on the trainer goes on.
            keep.fill_(99)
            try:
                calls.maybe_finalize_async_calls(blocking=True)
            except Exception as e:
                found.append(str(e))
                continue
            assert keep.data_ptr() == at
            found.append(digest(ours.load(sharded_state(place, empty=True), folder)) == expected(place, value=value))
        calls.close()
    return found


def test_megatrons_persistent_worker_saves_and_outlives_a_save_that_fails(host, tmp_path):
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    for first, failed, last in host.job(2).run(save_by_worker, [str(folder) for folder in folders]):
        assert (first, last) == (True, True)
        assert re.search(r"SystemRefused: .*gone.*\(rank 1\)", failed)


def repeat(kept, folder):
    from test_errors import outcome

    import tensorferry.megatron as ours

    del kept
    request = ours.save(sharded_state(Placement(*PLACE)), folder, async_sharded_save=True)
    room = Path(request.async_fn_args[0].folder)
    first, again = outcome(request.execute_sync), outcome(request.execute_sync)
    return first, again, room.exists()


def test_a_request_is_carried_out_once(host, tmp_path):
    for first, again, is_left in host.job(2).run(repeat, str(tmp_path)):
        assert (first, is_left) == ("nothing was raised", False)
        assert "has been finished before: each request is carried out once. Save again" in again


def kill_writer(kept, folder):
    """Megatron's queue, as in a trainer; the process that writes for rank 1 is killed while it writes."""
    import signal
    from unittest import mock

    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from test_errors import outcome

    import tensorferry.megatron as ours
    from tensorferry.dcp.file_writer import RankFile

    def die(file, *_):
        file.path.with_name(f"{file.path.name}.partial").write_bytes(b"begun")
        os.kill(os.getpid(), signal.SIGKILL)

    place = kept["place"]
    queue = AsyncCallsQueue()
    request = ours.save(sharded_state(place, value=2), folder, async_sharded_save=True)
    with mock.patch.object(RankFile, "write", die if torch.distributed.get_rank() == 1 else RankFile.write):
        queue.schedule_async_request(request)
    text = outcome(lambda: queue.maybe_finalize_async_calls(blocking=True))
    before = digest(ours.load(sharded_state(place, empty=True), folder)) == expected(place, value=1)
    # The group is as good as before.
    ours.save(sharded_state(place, value=3), folder)
    after = digest(ours.load(sharded_state(place, empty=True), folder)) == expected(place, value=3)
    return text, before, after


def test_a_killed_writer_is_an_error_on_every_rank_and_the_checkpoint_before_stays(host, tmp_path):
    host.job(2).run(save, str(tmp_path), 1)
    for text, before, after in host.job(2).run(kill_writer, str(tmp_path)):
        assert re.search(r"has ended without writing it: .* Save again \(rank 1\)", text)
        assert (before, after) == (True, True)


def ask(kept, folder):
    import megatron.core.dist_checkpointing as stock
    from megatron.core.dist_checkpointing import ShardedTensor
    from test_errors import outcome

    import tensorferry.megatron as ours
    from tensorferry.megatron import interfaces, release

    del kept
    place, rank = Placement(*PLACE), torch.distributed.get_rank()
    ours.save(sharded_state(place), folder, content_metadata={"format": "ours", "dp_cp_group": object()})
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("tensorferry").addHandler(handler)

    def load(module, asks, mode):
        """What a load says of keys; ``None`` if it says nothing."""
        state = sharded_state(place, empty=True)
        if asks == "less":
            state.pop("padded")
        elif asks == "more" and rank == 1:
            state["new"] = ShardedTensor.from_rank_offsets("new", torch.zeros(2))
        found = module.load(state, folder, ours.load_strategy(), strict=mode, validate_access_integrity=False)
        return [sorted(part) for part in found[1:]] if isinstance(found, tuple) else None

    for module in (ours, stock):
        for mode in ("log_all", "raise_all", "ignore_all", "assume_ok_unexpected"):
            assert load(module, "all", mode) is None
        assert load(module, "all", "return_all") == [[], []]
        assert load(module, "less", "return_all") == [["vocabulary"], []]
        # Megatron's tells only the rank that has asked.
        assert load(module, "more", "return_all") == [[], ["new"] if module is ours or rank == 1 else []]
        assert load(module, "more", "return_unexpected") == [[], ["new"] if module is ours or rank == 1 else []]
    assert logged == []
    for asks, mode in (
        ("more", "log_all"),
        ("less", "log_all"),
        ("more", "log_unexpected"),
        ("less", "log_unexpected"),
    ):
        assert load(ours, asks, mode) is None
    unexpected = "Unexpected keys (not found in the checkpoint): ['new']"
    missing = "Missing keys (in the checkpoint, and asked for by no rank): ['vocabulary']"
    assert logged == ([unexpected, missing, unexpected] if rank == 0 else [])
    assert unexpected in outcome(lambda: load(ours, "more", "raise_all"))
    logging.getLogger("tensorferry").removeHandler(handler)
    plain = {key: tuple(value.shape) for key, value in ours.load_plain_tensors(folder).items()}
    assert (plain["layers.column"], plain["scalar"]) == ((4, 48, 24), ())
    shared = ["common_state/shard_0_1"] if release.COMMON_IS_SHARDED else []
    objects = sorted(set(ours.load_sharded_metadata(folder)) - set(ours.load_tensors_metadata(folder)))
    assert objects == [*shared, *(f"layers.extra/shard_{i}_4" for i in range(4))]
    assert ours.load_content_metadata(folder) == {"format": "ours"}
    assert ours.load_common_state_dict(folder)["args"] == {"lr": 0.1, "names": ["a", "b"]}
    if interfaces.register_default_strategy.__module__.startswith("megatron"):
        loaded = stock.load(sharded_state(place, empty=True), folder)
        assert loaded.pop("content_metadata") == {"format": "ours"}
        assert digest(loaded) == expected(place)
    assert "is not changed" in outcome(lambda: ours.remove_sharded_tensors(folder, "layers."))


def test_a_checkpoint_answers_as_megatrons_do(each_host, tmp_path):
    each_host.job(2).run(ask, str(tmp_path))


def load_pickled(kept, folder):
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from test_errors import outcome

    import tensorferry.megatron as ours

    del kept
    rank = torch.distributed.get_rank()

    def object_alone(value=None):
        return {"o": ShardedObject("o", value, (1,), (0,), replica_id=rank)}

    def state(value=None):
        return object_alone(value) | {"spread": dataclasses.replace}

    ours.save(state(Path.home), f"{folder}/both")
    ours.save(object_alone(Path.home), f"{folder}/object")
    ours.save({"spread": dataclasses.replace}, f"{folder}/common")
    refused = [
        outcome(lambda: ours.load(object_alone(), f"{folder}/object")),
        outcome(lambda: ours.load({}, f"{folder}/common")),
    ]
    allowed = {"safe_globals": [Path.home, Path, getattr, dataclasses.replace]}
    found = [
        ours.load(state(), f"{folder}/both", ours.load_strategy(**options))
        for options in (allowed, {"trust_pickle": True})
    ]
    return refused, [(one["o"] == Path.home, one["spread"] is dataclasses.replace) for one in found]


def test_pickles_are_read_with_the_allow_list(host, tmp_path):
    for name in ("both", "object", "common"):
        (tmp_path / name).mkdir()
    for refused, found in host.job(2).run(load_pickled, str(tmp_path)):
        assert all("not on the allow-list" in text for text in refused), refused
        assert found == [(True, True)] * 2


def resize(kept, folder):
    from megatron.core.dist_checkpointing import ShardedTensor

    import tensorferry.megatron as ours

    rank = torch.distributed.get_rank()
    larger = torch.full((24, 3), 7.0)
    smaller = torch.full((18, 3), 7.0, dtype=torch.float64)
    state = {
        "larger": ShardedTensor.from_rank_offsets("vocabulary", larger, replica_id=rank, allow_shape_mismatch=True),
        "smaller": ShardedTensor.from_rank_offsets("vocabulary", smaller, replica_id=rank, allow_shape_mismatch=True),
    }
    found = ours.load(state, folder, validate_access_integrity=False)
    saved = sharded_state(kept["place"])["padded"].data
    return [
        found["larger"] is not None and found["larger"].data_ptr() == larger.data_ptr(),
        torch.equal(larger[:20], saved),
        larger[20:].count_nonzero().item() == 0,
        torch.equal(smaller.float(), saved[:18]),
    ]


def test_a_padded_tensor_may_change_its_size_and_dtype(host, tmp_path):
    host.job(2).run(save, str(tmp_path), 0)
    assert host.job(2).run(resize, str(tmp_path)) == [[True] * 4] * 2
