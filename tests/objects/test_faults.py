"""What a store or the network does wrong ends in the state that was saved, or in an error in time that names it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import signal
import socket
import time
from datetime import timedelta

import dcp_doors
import pytest
import torch
import torch.distributed.checkpoint as dcp

from stores import BUCKET, FORBIDDEN, SLOW_DOWN, LyingStore, client, objects, uploads
from tensorferry.dcp import FileReader
from tensorferry.errors import (
    CorruptCheckpoint,
    FetchTimeout,
    IncompleteCheckpoint,
    SourceChanged,
    StoreRefused,
    TensorferryError,
)
from tensorferry.storage.objects import bucket, reader, requests, upload
from tensorferry.storage.objects import client as making
from tensorferry.storage.objects.requests import Calls, Deadline
from tensorferry.storage.places import any_place

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EXPIRED = 403, b"<Error><Code>ExpiredToken</Code><Message>The token has expired, says status 501.</Message></Error>"
NO_UPLOAD = 404, b"<Error><Code>NoSuchUpload</Code></Error>"


@pytest.fixture
def gateway(gateway, monkeypatch):
    monkeypatch.setattr(upload, "PART", 5 << 20)
    monkeypatch.setattr(making, "_LONGEST_PAUSE_S", 0.5)
    monkeypatch.setattr(reader, "_STALL_S", 0.5)
    return gateway


def state(seed=0, parts=2):
    torch.manual_seed(seed)
    return {"w": torch.randn(parts * 5 << 18), "small": torch.randn(3)}


def save(value, place, seconds=30.0):
    dcp_doors.save(value, place, timeout=timedelta(seconds=seconds))


def load(value, place, seconds=30.0):
    into = dcp_doors.load(value, place, timeout=timedelta(seconds=seconds))
    return all(torch.equal(into[name], tensor) for name, tensor in value.items())


#: What happens to which requests of a save, how long it may take, and how it fails.
SAVES = {
    "a part is refused again and again": (
        "PUT",
        "partNumber=2",
        SLOW_DOWN,
        30,
        r"rank\w+-\w+\.safetensors, part 2: .*Slow",
    ),
    "a part is refused": ("PUT", "partNumber=2", (400, b"<Error><Code>Bad</Code></Error>"), 30, "Bad"),
    "a part stalls": ("PUT", "partNumber", "stall", 3, r"rank00000.*within 3 s"),
    "a part is kept in part": ("PUT", "partNumber=3", "halve", 30, r"rank00000.*: the store has kept \d+ bytes of \d+"),
    "an upload is forgotten": ("POST", "uploadId=", NO_UPLOAD, 30, "there is no such object"),
    "all is refused": ("", "", EXPIRED, 30, r"ExpiredToken \(The token has expired"),
    # Whatever words are in the key and in the answer.
    "the index is refused": ("PUT", "/index.safe", EXPIRED, 30, "does not permit it: status 403, ExpiredToken"),
}


@pytest.mark.waits
@pytest.mark.parametrize("fault", SAVES)
def test_a_save_that_fails_says_why_and_leaves_the_last_checkpoint(gateway, server, fault, caplog):
    method, path, answer, seconds, match = SAVES[fault]
    server.prefix += "/status 501"
    save(state(1), server.place)
    gateway.act = lambda _, m, p: answer if m.startswith(method) and path in p else None
    with pytest.raises(TensorferryError, match=match) as raised:
        save(state(2), server.place, seconds)
    gateway.act = lambda *_: None
    assert load(state(1), server.place)
    assert not re.search(r"test-secret|X-Amz|Signature|uploadId|Authorization", str(raised.value) + caplog.text)
    assert "no conditional writes" not in caplog.text
    if fault == "a part is refused":
        assert not uploads(server.url, server.prefix)


#: Likewise of a load.
LOADS = {
    "it stalls": ("/rank", "stall", FetchTimeout, r"rank00000.*within 3 s"),
    "a byte is changed": (
        "/rank",
        lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:] if len(data) > 100_000 else data,
        CorruptCheckpoint,
        r"rank00000.*does not match its checksum",
    ),
    "an answer is too long": ("/rank", lambda data: data + b"x" * 50, TensorferryError, "more bytes than were"),
    "the marker is junk": ("/.metadata", (200, b"<html>Sign in</html>"), StoreRefused, r"/\.metadata: opening it"),
    "the marker is refused": ("/.metadata", FORBIDDEN, StoreRefused, r"/\.metadata: opening it"),
}


@pytest.mark.waits
@pytest.mark.parametrize("fault", LOADS)
def test_a_load_that_fails_says_why(gateway, server, fault):
    path, answer, error, match = LOADS[fault]
    save(state(6), server.place)
    gateway.act = lambda _, method, p: answer if method == "GET" and path in p else None
    with pytest.raises(error, match=match):
        load(state(6), server.place, 3 if answer == "stall" else 30)


def once(action, times=1):
    """Returns what does it so many times."""
    left = [None] * times
    return lambda: left and (left.pop() or action)


#: What happens for a while, and does no harm.
PASSES = {
    "connections break": ("GET", "/rank", lambda: once("break", 2)),
    "an answer breaks off": ("GET", "/rank", lambda: once(lambda data: data[: len(data) // 2])),
    "a busy store": ("PUT", "/index.safe", lambda: once(SLOW_DOWN, 2)),
    "the answer to the index is lost": ("PUT", "/index.safe", lambda: once("lose")),
    "the answer to the last part is lost": ("POST", "uploadId=", lambda: once("lose")),
}


@pytest.mark.waits
@pytest.mark.parametrize("fault", PASSES)
def test_what_passes_does_no_harm(gateway, server, fault):
    method, path, make = PASSES[fault]
    asked, next_one = [], make()

    def act(_, m, p):
        if m != method or path not in p:
            return None
        asked.append(p)
        # The upload is over then, and stores differ in what they say to who ends it again.
        return next_one() or (NO_UPLOAD if method == "POST" and len(asked) == 2 else None)

    gateway.act = act
    save(state(1), server.place)
    assert load(state(1), server.place)
    assert len(asked) > 1


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


@pytest.mark.parametrize("by", ["its caller", "its deadline"])
def test_an_exit_waits_for_what_was_cancelled_just_before(by):
    """However a request of the client's own library ends before its time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        store = making.client_of("s3://bucket", {"endpoint": endpoint, "skip_signature": True}, 30).store
        before = time.monotonic()
        future = Calls(Deadline(30 if by == "its caller" else 0.2)).begin(lambda: store.get_async("object"))
        listener.accept()[0].close()
        if by == "its caller":
            future.cancel()
        with pytest.raises((concurrent.futures.CancelledError, TimeoutError)):
            future.result(10)
        # What a caller cancels is cancelled in the loop.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), making.loop()).result(10)
        assert making.loop().cancelled >= before


def test_a_request_that_outlives_its_deadline_is_given_up(monkeypatch):
    """As one that does not end although it was told to."""
    monkeypatch.setattr(requests, "_LATE_S", 0.0)
    with pytest.raises(FetchTimeout, match="x: reading it"):
        Calls(Deadline(0.1)).finish(concurrent.futures.Future(), "x", "reading it")


@pytest.mark.usefixtures("server")
def test_a_bucket_that_is_missing_is_named():
    with pytest.raises(StoreRefused, match="NoSuchBucket"):
        save(state(7), "s3://no-such-bucket/x")


@pytest.mark.waits
@pytest.mark.parametrize("work", [save, load])
def test_ctrl_c_ends_it_soon(gateway, server, work):
    save(state(8), server.place)
    interrupt = once(lambda: os.kill(os.getpid(), signal.SIGINT))

    def act(_, method, path):
        if "/rank" not in path or method not in ("PUT", "GET"):
            return None
        if act_now := interrupt():
            act_now()
        return "stall"

    gateway.act = act
    # torch collects it like any exception of a rank.
    with pytest.raises(dcp.api.CheckpointException, match="KeyboardInterrupt"):
        work(state(8), server.place, 600)


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


@pytest.mark.parametrize("how", ["lost", "short"])
def test_an_index_that_the_store_has_not_kept_removes_no_checkpoint(gateway, server, how):
    save(state(1, 0), server.place)
    before = objects(server.url, server.prefix)
    gateway.act = LyingStore(server.url, "/index.safetensors", how)
    with pytest.raises((StoreRefused, SourceChanged), match=r"has kept|not kept"):
        save(state(2, 0), server.place)
    after = objects(server.url, server.prefix)
    ranks = {key: data for key, data in before.items() if "/rank" in key}
    assert ranks
    assert (before if how == "lost" else ranks).items() <= after.items()


@pytest.mark.parametrize("how", ["lost", "short"])
@pytest.mark.parametrize("write", [lambda place, data: place.put(data, "overwrite"), bucket.put_new, "file"])
def test_what_one_request_writes_is_looked_at_once_more(gateway, server, tmp_path, write, how):
    place, data = any_place(f"{server.place}/x"), os.urandom(100)
    (tmp_path / "x").write_bytes(data)
    gateway.act = LyingStore(server.url, "/x", how)
    with pytest.raises((StoreRefused, SourceChanged), match=r"has kept|not kept"):
        upload.upload_file(place, tmp_path / "x") if write == "file" else write(place, data)


def test_a_store_that_is_ill_is_not_asked_for_a_whole_object(gateway, server):
    """The number of a status stands in the key."""
    place = any_place(f"{server.place}/step-4160")
    client(server.url).put_object(Bucket=BUCKET, Key=place.key, Body=b"x")
    gateway.act = lambda _, method, __: (400, b"<Error><Code>Bad</Code></Error>") if method == "GET" else None
    with pytest.raises(StoreRefused, match="Bad"):
        place.read_bytes()
    assert [method for method, _ in gateway.seen] == ["GET"]


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
    for seed in (12, 13):
        save(state(seed), server.place)
        assert len(refused) == 1
        assert caplog.text.count("this store has no conditional writes") == 1
    gateway.act = lambda *_: None
    assert load(state(13), server.place)
    with pytest.raises(IncompleteCheckpoint):
        load(state(13), f"{server.place}/503 SlowDown timed out connection refused")
