"""Saves in the background, saves that are killed, and what else a checkpoint can be asked."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import random
import re
import time
from pathlib import Path

import pytest
import torch
from placed import RELEASES, Placement, digest, expected, perform, sharded_state

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


def test_a_save_in_a_forked_process_holds_the_state_as_it_was(host, tmp_path):
    for found, wanted in host.job(2).run(save_async, str(tmp_path)):
        assert found == wanted


def send(kept, folder):
    import tensorferry.megatron as ours

    del kept
    place = Placement(1, 1, 1)
    state = sharded_state(place, value=7)
    keep = state["scalar"].data
    at = keep.data_ptr()
    request = ours.save(state, folder, async_sharded_save=True)
    # What Megatron's persistent worker does, whose process needs a GPU: the request is pickled without its last
    # functions, and the worker calls the rest.
    spawning = torch.multiprocessing.get_context("spawn")
    orders, answers = spawning.SimpleQueue(), spawning.SimpleQueue()
    worker = spawning.Process(target=work, args=(orders, answers))
    worker.start()
    orders.put(request._replace(finalize_fns=[]))
    assert answers.get() == "preloaded"
    keep.fill_(99)
    assert answers.get() == "written"
    worker.join()
    for function in request.finalize_fns:
        function()
    assert keep.data_ptr() == at
    return digest(ours.load(sharded_state(place, empty=True), folder)), expected(place, value=7)


def work(orders, answers):
    request = orders.get()
    arguments = list(request.async_fn_args)
    arguments[1] = request.preload_fn()
    answers.put("preloaded")
    request.async_fn(*arguments)
    answers.put("written")


@pytest.mark.nightly
def test_a_save_in_a_spawned_process_holds_the_state_as_it_was(host, tmp_path):
    if host.release != RELEASES[-1] and not os.environ.get("TENSORFERRY_MEGATRON_RANKS"):
        pytest.skip("the process imports Megatron once more, which takes 13 s of CPU: of one release only")
    for found, wanted in host.job(1).run(send, str(tmp_path)):
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


def drop_and_repeat(kept, folder):
    from test_errors import outcome

    import tensorferry.megatron as ours

    del kept
    state = sharded_state(Placement(*PLACE))
    request = ours.save(state, folder, async_sharded_save=True)
    dropped = request.async_fn_args[0].folder
    request = None
    gone = not Path(dropped).exists()
    request = ours.save(state, folder, async_sharded_save=True)
    return gone, outcome(request.execute_sync), outcome(request.execute_sync)


def test_a_request_is_carried_out_once_and_leaves_nothing_behind_if_it_never_is(host, tmp_path):
    for gone, first, again in host.job(2).run(drop_and_repeat, str(tmp_path)):
        assert gone
        assert first == "nothing was raised"
        assert re.search("has been finished before: each request is carried out once. Save again", again)


def fail_async(kept, folder):
    from test_errors import outcome

    import tensorferry.megatron as ours

    del kept
    request = ours.save(sharded_state(Placement(*PLACE)), folder, async_sharded_save=True)
    job, *rest = request.async_fn_args
    rest[0] = request.preload_fn()
    if torch.distributed.get_rank() == 1:
        # As if the folder were gone.
        file = dataclasses.replace(job.file, path=Path(folder) / "gone" / "file")
        job = dataclasses.replace(job, file=file)
    request.async_fn(job, *rest)

    def finish():
        for function in request.finalize_fns:
            function()

    return outcome(finish)


def test_a_background_write_that_fails_is_an_error_on_every_rank(host, tmp_path):
    for text in host.job(2).run(fail_async, str(tmp_path)):
        assert re.search(r"SystemRefused: .*gone.*\(rank 1\)", text)
    assert not (tmp_path / "metadata.json").exists()


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


def save_without_room(kept, folder, room):
    import tempfile
    from unittest import mock

    from test_errors import outcome

    import tensorferry.megatron as ours

    del kept
    # Where the results of the other process are to appear.
    temporary = "/nowhere" if torch.distributed.get_rank() == 1 else room
    with mock.patch.object(tempfile, "tempdir", temporary):
        text = outcome(lambda: ours.save(sharded_state(Placement(*PLACE)), folder, async_sharded_save=True))
    torch.distributed.barrier()
    return text, os.listdir(room)


def test_a_rank_without_temporary_files_is_an_error_on_every_rank(host, tmp_path):
    folder, room = tmp_path / "ck", tmp_path / "temporary"
    folder.mkdir()
    room.mkdir()
    for text, left in host.job(2).run(save_without_room, str(folder), str(room)):
        assert re.search(r"FileNotFoundError: .*/nowhere.*\(rank 1\)", text)
        assert not left


def save(kept, folder, value):
    import tensorferry.megatron as ours

    kept["place"] = Placement(*PLACE)
    ours.save(sharded_state(kept["place"], value=value), folder)


def save_for_ever(kept, folder):
    import tensorferry.megatron as ours

    place = kept["place"]
    value = 100
    while True:
        value += 1
        ours.save(sharded_state(place, value=value), folder)


def load(kept, folder):
    import tensorferry.megatron as ours

    del kept
    place = Placement(*PLACE)
    found = ours.load(sharded_state(place, empty=True), folder)
    return digest(found), expected(place, value=found["iteration"] - 100)


def test_a_save_that_is_killed_leaves_the_checkpoint_before(host, tmp_path, pytestconfig):
    folder = tmp_path / "ck"
    folder.mkdir()
    random.seed(1)
    for _ in range(max(1, pytestconfig.getoption("--kills") // 5)):
        host.job(2).run(save, str(folder), 1)
        host.job(2).start(save_for_ever, str(folder))
        time.sleep(0.05 + random.random() * 0.2)
        host.job(2).kill()
        host.job(2).run(mend, str(folder))
        for found, wanted in host.job(2).run(load, str(folder)):
            assert found == wanted


def mend(kept, folder):
    """The only thing that a kill may leave is a common.pt that is one save ahead of the index."""
    import tensorferry.megatron as ours

    del kept
    if torch.distributed.get_rank() == 0:
        ours.restore_common(folder)
    torch.distributed.barrier()


def ask(kept, folder):
    import megatron.core.dist_checkpointing as stock
    from megatron.core.dist_checkpointing import ShardedTensor

    import tensorferry.megatron as ours
    from tensorferry.megatron import interfaces, release

    del kept
    place = Placement(*PLACE)
    content = {"format": "ours", "dp_cp_group": object()}
    ours.save(sharded_state(place), folder, content_metadata=content)
    found = {}
    rank = torch.distributed.get_rank()

    def state(asks="all"):
        made = sharded_state(place, empty=True)
        if asks == "less":
            made.pop("padded")
        elif asks == "more" and rank == 1:
            made["new"] = ShardedTensor.from_rank_offsets("new", torch.zeros(2))
        return made

    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("tensorferry").addHandler(handler)
    ours.load(state("more"), folder, strict="log_all", validate_access_integrity=False)
    ours.load(state("less"), folder, strict="log_all")
    ours.load(state("more"), folder, strict="log_unexpected", validate_access_integrity=False)
    ours.load(state("less"), folder, strict="log_unexpected")
    logging.getLogger("tensorferry").removeHandler(handler)
    found["logged"] = logged
    for name, module in (("ours", ours), ("stock", stock)):
        for mode in ("log_all", "raise_all", "ignore_all", "return_all", "return_unexpected", "assume_ok_unexpected"):
            result = module.load(state(), folder, ours.load_strategy(), strict=mode)
            found[name, mode, "all"] = [sorted(part) for part in result[1:]] if isinstance(result, tuple) else "state"
            if mode not in ("raise_all", "assume_ok_unexpected"):
                result = module.load(
                    state("more"), folder, ours.load_strategy(), strict=mode, validate_access_integrity=False
                )
                found[name, mode, "more"] = (
                    [sorted(part) for part in result[1:]] if isinstance(result, tuple) else "state"
                )
        result = module.load(state("less"), folder, ours.load_strategy(), strict="return_all")
        found[name, "return_all", "less"] = [sorted(part) for part in result[1:]]
    found["plain"] = {key: tuple(value.shape) for key, value in ours.load_plain_tensors(folder).items()}
    found["objects"] = sorted(set(ours.load_sharded_metadata(folder)) - set(ours.load_tensors_metadata(folder)))
    found["shared"] = ["common_state/shard_0_1"] if release.COMMON_IS_SHARDED else []
    found["content"] = ours.load_content_metadata(folder)
    found["common"] = ours.load_common_state_dict(folder)["args"]
    if interfaces.register_default_strategy.__module__.startswith("megatron"):
        loaded = stock.load(state(), folder)
        found["registry"] = [loaded.pop("content_metadata"), digest(loaded) == expected(place)]
        # Megatron's gives the common state as well.
        assert stock.load_plain_tensors(folder).keys() >= found["plain"].keys()
    torch.distributed.barrier()
    if rank == 0:
        ours.remove_sharded_tensors(folder, "layers.")
    torch.distributed.barrier()
    found["left"] = sorted(ours.load_sharded_metadata(folder))
    return found


def test_a_checkpoint_answers_as_megatrons_do(host, tmp_path):
    for rank, found in enumerate(host.job(2).run(ask, str(tmp_path))):
        for name in ("ours", "stock"):
            for mode in ("log_all", "raise_all", "ignore_all", "assume_ok_unexpected"):
                assert found[name, mode, "all"] == "state"
            assert found[name, "return_all", "all"] == [[], []]
            assert found[name, "return_all", "less"] == [["vocabulary"], []]
            # Megatron's tells only the rank that has asked.
            unexpected = ["new"] if name == "ours" or rank == 1 else []
            assert found[name, "return_all", "more"] == [[], unexpected]
        unexpected = "Unexpected keys (not found in the checkpoint): ['new']"
        missing = "Missing keys (in the checkpoint, and asked for by no rank): ['vocabulary']"
        assert found["logged"] == ([unexpected, missing, unexpected] if rank == 0 else [])
        assert found["plain"]["layers.column"] == (4, 48, 24)
        assert found["plain"]["scalar"] == ()
        assert found["objects"] == [*found["shared"], *(f"layers.extra/shard_{i}_4" for i in range(4))]
        assert found["content"] == {"format": "ours"}
        assert found["common"] == {"lr": 0.1, "names": ["a", "b"]}
        assert found.get("registry", [{"format": "ours"}, True]) == [{"format": "ours"}, True]
        assert found["left"] == sorted([*found["shared"], "gated", "optimizer.flat", "scalar", "vocabulary"])


def remove_all(kept, folder):
    import tensorferry.megatron as ours

    del kept
    ours.save(sharded_state(Placement(*PLACE)), folder)
    if torch.distributed.get_rank() == 0:
        kept_files = []
        # The common state is inside the checkpoint, in the file of the first rank.
        for prefix in ("layers.", ""):
            ours.remove_sharded_tensors(folder, prefix)
            kept_files.append(len(list(Path(folder).glob("rank*"))))
        return kept_files
    return None


def test_a_file_goes_when_nothing_in_it_is_left(host, tmp_path):
    assert host.job(2).run(remove_all, str(tmp_path))[0] == [2, 0]


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


def refuse(kept, folder):
    from test_errors import outcome

    import tensorferry.megatron as ours

    place = kept["place"]
    state = sharded_state(place, empty=True)
    state.pop("padded")
    if torch.distributed.get_rank() == 1:
        state["new"] = state.pop("scalar")
        state["new"].key = "new"
    return outcome(lambda: ours.load(state, folder, strict="raise_all", validate_access_integrity=False))


def test_a_mismatch_on_one_rank_is_raised_on_all(host, tmp_path):
    host.job(2).run(save, str(tmp_path), 0)
    for text in host.job(2).run(refuse, str(tmp_path)):
        assert re.search(r"Unexpected keys \(not found in the checkpoint\): \['new'\]; Missing keys .* \['voc", text)


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
