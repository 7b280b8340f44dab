"""What a store or the network does wrong ends in the state that was saved, or in an error in time that names it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import logging
import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp

from stores import BUCKET, FORBIDDEN, SLOW_DOWN, client, objects, uploads
from tensorferry.checkpointing import SyncCheckpointer
from tensorferry.dcp import FileReader, FileWriter, own_errors
from tensorferry.errors import (
    FetchTimeout,
    IncompleteCheckpoint,
    SourceChanged,
    StoreRefused,
    SystemRefused,
    TensorferryError,
)
from tensorferry.storage.objects import bucket, reader, upload
from tensorferry.storage.objects import client as making
from tensorferry.storage.objects.requests import Calls, Deadline
from tensorferry.storage.places import any_place

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def gateway(gateway, monkeypatch):
    monkeypatch.setattr(upload, "PART", 5 << 20)
    return gateway


def state(seed=0, parts=2):
    torch.manual_seed(seed)
    return {"w": torch.randn(parts * 5 << 18), "small": torch.randn(3)}


def save(value, place, seconds=30.0):
    with own_errors():
        dcp.save(value, storage_writer=FileWriter(place, timeout=timedelta(seconds=seconds)), no_dist=True)


def load(value, place, seconds=30.0):
    into = {name: torch.zeros_like(tensor) for name, tensor in value.items()}
    with own_errors():
        dcp.load(into, storage_reader=FileReader(place, timeout=timedelta(seconds=seconds)), no_dist=True)
    return all(torch.equal(into[name], tensor) for name, tensor in value.items())


@pytest.mark.waits
def test_lost_connections_are_made_again(gateway, server):
    gateway.act = lambda number, method, _: "break" if number % 4 == 1 and method in ("GET", "HEAD") else None
    save(state(2), server.place)
    assert load(state(2), server.place)


@pytest.mark.waits
def test_a_part_that_is_refused_again_and_again_is_named(gateway, server, monkeypatch):
    monkeypatch.setattr(making, "_LONGEST_PAUSE_S", 0.5)
    gateway.act = lambda _, method, path: SLOW_DOWN if method == "PUT" and "partNumber=2" in path else None
    with pytest.raises((StoreRefused, FetchTimeout), match=r"rank00000-\w+\.safetensors, part 2: .*SlowDown") as raised:
        # The last attempt ends long before the deadline.
        save(state(3), server.place, 30)
    assert "uploadId" not in str(raised.value)


@pytest.mark.waits
def test_a_store_that_stalls_ends_the_save_in_time(gateway, server):
    save(state(4), server.place)
    gateway.act = lambda _, method, path: "stall" if method == "PUT" and "partNumber" in path else None
    with pytest.raises(FetchTimeout, match=r"rank00000.*within 3 s"):
        save(state(5), server.place, 3)
    gateway.act = lambda *_: None
    assert load(state(4), server.place)


@pytest.mark.waits
def test_an_index_that_did_not_come_is_not_waited_for_once_more(gateway, server):
    """torch asks for an index of the rank alone when the one of all cannot be read."""
    gateway.act = lambda *_: "stall"
    reader_ = FileReader(server.place, timeout=timedelta(seconds=1))
    with pytest.raises(FetchTimeout) as first:
        reader_.read_metadata()
    asked = len(gateway.seen)
    with pytest.raises(FetchTimeout) as second:
        reader_.read_metadata(rank=0)
    assert second.value is first.value
    assert len(gateway.seen) == asked


def out_of_memory(*_, **__):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.waits
@pytest.mark.usefixtures("gateway")
def test_without_memory_for_a_part_a_save_says_so(server, monkeypatch):
    save(state(4), server.place)
    with monkeypatch.context() as little:
        little.setattr(upload.mmap, "mmap", out_of_memory)
        with pytest.raises(SystemRefused, match=r"rank00000.*Cannot allocate memory"):
            save(state(5), server.place)
    assert load(state(4), server.place)
    save(state(5), server.place)
    assert load(state(5), server.place)
    assert not uploads(server.url, server.prefix)


def cancelled_by_its_caller(slow, listener):
    calls = Calls(Deadline(30))
    future = calls.begin(slow)
    listener.accept()[0].close()
    calls.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(10)


def cancelled_by_its_deadline(slow, _):
    with pytest.raises(TimeoutError):
        Calls(Deadline(0.2)).begin(slow).result(10)


@pytest.mark.parametrize("cancel", [cancelled_by_its_caller, cancelled_by_its_deadline])
def test_an_exit_waits_for_what_was_cancelled_just_before(cancel):
    """However a request of the client's own library ends before its time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        store = making.client_of("s3://bucket", {"endpoint": endpoint, "skip_signature": True}, 30).store
        before = time.monotonic()
        assert making.loop().cancelled < before
        cancel(lambda: store.get_async("object"), listener)
        # What a caller cancels is cancelled in the loop.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), making.loop()).result(10)
        assert making.loop().cancelled >= before


@pytest.mark.waits
def test_a_read_that_stalls_once_is_made_again(gateway, server, monkeypatch):
    monkeypatch.setattr(reader, "_STALL_S", 0.5)
    save(state(4), server.place)
    stalled = []

    def act(_, method, path):
        if method == "GET" and "/rank" in path and len(stalled) < 1:
            stalled.append(path)
            return lambda data: data[: len(data) // 2]
        return None

    gateway.act = act
    assert load(state(4), server.place)
    assert stalled


@pytest.mark.waits
def test_an_answer_that_is_too_long_is_refused(gateway, server):
    save(state(6), server.place)
    gateway.act = lambda _, method, path: (
        (lambda data: data + b"x" * 50) if method == "GET" and "/rank" in path else None
    )
    with pytest.raises(TensorferryError, match="more bytes than were requested"):
        load(state(6), server.place)


def test_a_refusal_names_what_the_store_said(gateway, server):
    gateway.act = lambda *_: (403, b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>")
    with pytest.raises(StoreRefused, match=r"ExpiredToken \(The token has expired\.\)"):
        save(state(7), server.place)
    # The answer to a HEAD request has no body.
    with pytest.raises(StoreRefused, match="does not permit"):
        load(state(7), server.place)


@pytest.mark.usefixtures("server")
def test_a_bucket_that_is_missing_is_named():
    with pytest.raises(StoreRefused, match="NoSuchBucket"):
        save(state(7), "s3://no-such-bucket/x")


def test_no_message_has_keys_or_queries(gateway, server, caplog):
    caplog.set_level(logging.DEBUG, "tensorferry")
    for answer in ((403, b"no"), (400, b"bad"), (404, b"<Error><Code>NoSuchBucket</Code></Error>")):
        gateway.act = lambda *_, answer=answer: answer
        with pytest.raises(TensorferryError) as raised:
            save(state(7), server.place, 5)
        told = str(raised.value) + caplog.text
        assert not re.search(r"test-secret|X-Amz|Signature|uploadId|Authorization", told), told


@pytest.mark.waits
def test_ctrl_c_ends_a_save_soon(gateway, server):
    gateway.act = lambda _, __, path: "stall" if "partNumber" in path else None
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    # torch collects it like any exception of a rank.
    with pytest.raises(dcp.api.CheckpointException, match="KeyboardInterrupt"):
        save(state(8), server.place, 600)


def test_a_failed_save_leaves_no_parts(gateway, server):
    gateway.act = lambda _, __, path: (400, b"<Error><Code>Bad</Code></Error>") if "partNumber=2" in path else None
    with pytest.raises(StoreRefused):
        save(state(9), server.place)
    assert not uploads(server.url, server.prefix)
    assert not objects(server.url, server.prefix)


@pytest.mark.parametrize("parts", [0, 2], ids=["whole", "in parts"])
def test_what_a_store_has_kept_a_part_of_only_is_not_committed(gateway, server, parts):
    """It answers that all is well."""
    save(state(4, parts), server.place)

    def act(_, method, path):
        is_last = "partNumber=3" in path if parts else method == "PUT"
        return "halve" if is_last and "/rank" in path else None

    gateway.act = act
    with pytest.raises(StoreRefused, match=r"rank00000.*: the store has kept \d+ bytes of \d+"):
        save(state(5, parts), server.place)
    gateway.act = lambda *_: None
    assert load(state(4, parts), server.place)


@pytest.mark.parametrize("nbytes", [1 << 10, 12 << 20], ids=["whole", "in parts"])
def test_a_file_that_is_cut_off_while_it_is_copied_is_no_copy(server, tmp_path, monkeypatch, nbytes):
    (tmp_path / "x").write_bytes(bytes(nbytes))
    size = upload.part_bytes(nbytes)

    def cut(_):
        os.truncate(tmp_path / "x", nbytes // 3)
        return size

    # Between the look at its length and the first read.
    monkeypatch.setattr(upload, "part_bytes", cut)
    with pytest.raises(SourceChanged, match="was changed while it was copied"):
        upload.upload_file(any_place(f"{server.place}/x"), tmp_path / "x")


def by_writer(place, number):
    save(state(number, 0), place)


def by_checkpointer(place, number):
    SyncCheckpointer(patience=20).save(place, state(number, 0))


def into_a_run(place, number):
    SyncCheckpointer(patience=20, keep_last=1).save(f"{place}/step-{number}", state(number, 0), step=number)


def forgetful(server, names, how):
    """Returns what answers each PUT of such an object as if it were kept, and keeps what was there, or fewer bytes."""
    s3 = client(server.url)

    def act(_, method, path):
        key = path.removeprefix(f"/{BUCKET}/")
        if method != "PUT" or not key.endswith(names):
            return None
        before = objects(server.url, key).get(key)

        def forget(data):
            if how == "short":
                s3.put_object(Bucket=BUCKET, Key=key, Body=objects(server.url, key)[key][:-10])
            elif before is None:
                s3.delete_object(Bucket=BUCKET, Key=key)
            else:
                s3.put_object(Bucket=BUCKET, Key=key, Body=before)
            return data

        return forget

    return act


@pytest.mark.parametrize("how", ["lost", "short"])
@pytest.mark.parametrize("save_at", [by_writer, by_checkpointer, into_a_run])
def test_an_index_that_the_store_has_not_kept_removes_no_checkpoint(gateway, server, save_at, how):
    save_at(server.place, 1)
    before = objects(server.url, server.prefix)
    gateway.act = forgetful(server, "/index.safetensors", how)
    with pytest.raises((StoreRefused, SourceChanged), match=r"has kept|not kept"):
        save_at(server.place, 2)
    gateway.act = lambda *_: None
    after = objects(server.url, server.prefix)
    ranks = {key: data for key, data in before.items() if "/rank" in key}
    assert ranks
    assert ranks.items() <= after.items()
    if how == "lost":
        assert before.items() <= after.items()


@pytest.mark.parametrize("how", ["lost", "short"])
@pytest.mark.parametrize("write", [lambda place, data: place.put(data, "overwrite"), bucket.put_new, "file"])
def test_what_one_request_writes_is_looked_at_once_more(gateway, server, tmp_path, write, how):
    place, data = any_place(f"{server.place}/x"), os.urandom(100)
    (tmp_path / "x").write_bytes(data)
    gateway.act = forgetful(server, "/x", how)
    with pytest.raises((StoreRefused, SourceChanged), match=r"has kept|not kept"):
        upload.upload_file(place, tmp_path / "x") if write == "file" else write(place, data)


@pytest.mark.parametrize("answer", [(200, b"<html>Sign in</html>"), FORBIDDEN], ids=["junk", "forbidden"])
def test_a_marker_that_the_store_does_not_give_is_no_second_checkpoint(gateway, server, answer):
    """Nobody is told to remove it."""
    save(state(4), server.place)
    gateway.act = lambda _, method, path: answer if method == "GET" and path.endswith("/.metadata") else None
    with pytest.raises(StoreRefused, match=r"/\.metadata: opening it"):
        load(state(4), server.place)


def test_a_store_that_is_ill_is_not_asked_for_a_whole_object(gateway, server):
    """The number of a status stands in the key."""
    place = any_place(f"{server.place}/step-4160")
    place.write_bytes(b"x")
    gateway.act = lambda _, method, __: (400, b"<Error><Code>Bad</Code></Error>") if method == "GET" else None
    gateway.seen.clear()
    with pytest.raises(StoreRefused, match="Bad"):
        place.read_bytes()
    assert [method for method, _ in gateway.seen] == ["GET"]


@pytest.mark.waits
def test_an_index_whose_answer_was_lost_counts(gateway, server):
    lost = []

    def act(_, method, path):
        if method == "PUT" and path.endswith("/index.safetensors") and not lost:
            lost.append(path)
            key = path.removeprefix(f"/{BUCKET}/")
            return lambda _: client(server.url).head_object(Bucket=BUCKET, Key=key) and b""
        return None

    gateway.act = act
    save(state(10), server.place)
    assert lost
    assert load(state(10), server.place)


@pytest.mark.waits
def test_an_upload_whose_last_answer_was_lost_counts(gateway, server):
    lost = []

    def act(_, method, path):
        if method == "POST" and "uploadId=" in path:
            lost.append(path)
            # The upload is over then, and stores differ in what they say to who ends it again.
            return "lose" if len(lost) == 1 else (404, b"<Error><Code>NoSuchUpload</Code></Error>")
        return None

    gateway.act = act
    save(state(20), server.place)
    assert len(lost) == 2
    assert load(state(20), server.place)


def test_an_upload_that_the_store_does_not_know_has_failed(gateway, server):
    answer = 404, b"<Error><Code>NoSuchUpload</Code></Error>"
    gateway.act = lambda _, method, path: answer if method == "POST" and "uploadId=" in path else None
    with pytest.raises(IncompleteCheckpoint, match="there is no such object"):
        save(state(21), server.place)


@pytest.mark.parametrize("key", ["NotImplemented", "status 501"])
def test_a_refusal_is_no_store_without_conditions(gateway, server, key, caplog):
    """Whatever words are in the key and in the answer: only the status counts."""
    place = f"{server.place}/{key}"
    answer = 403, b"<Error><Code>AccessDenied</Code><Message>NotImplemented, status 501</Message></Error>"
    gateway.act = lambda _, method, path: answer if method == "PUT" and "/index.safe" in path else None
    with pytest.raises(StoreRefused, match="does not permit it: status 403, AccessDenied"):
        save(state(11), place)
    assert len([path for method, path in gateway.seen if method == "PUT" and "/index.safe" in path]) == 1
    assert "no conditional writes" not in caplog.text


def test_a_store_without_conditions_is_told_and_used(gateway, server, caplog, monkeypatch):
    """The library makes a request again after 5xx, whatever it is; this one is asked once."""
    monkeypatch.setattr(bucket, "_warned", set())
    refused = []

    def act(number, method, path):
        conditions = {"if-match", "if-none-match"}
        if method == "PUT" and conditions & gateway.headers[number].keys():
            refused.append(path)
            return 501, b"<Error><Code>NotImplemented</Code><Message>A header is not implemented.</Message></Error>"
        return None

    gateway.act = act
    save(state(12), server.place)
    assert len(refused) == 1
    assert "this store has no conditional writes" in caplog.text
    gateway.act = lambda *_: None
    assert load(state(12), server.place)


@pytest.mark.waits
def test_a_store_that_is_busy_at_a_conditional_write_is_asked_again(gateway, server):
    asked = []

    def act(_, method, path):
        if method == "PUT" and "/index.safe" in path:
            asked.append(path)
            return SLOW_DOWN if len(asked) < 3 else None
        return None

    gateway.act = act
    save(state(12), server.place)
    assert len(asked) == 3
