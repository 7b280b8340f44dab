"""What a keeper counts as its memory, and what a message or a copy may cost it."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from keepers import KeeperAtWork, Told, connected, eventually, loaded, offered, staged
from tensorferry.checkpointing import handover
from tensorferry.checkpointing.keeper import cost
from tensorferry.checkpointing.keeper.client import Keeper
from tensorferry.checkpointing.keeper.clients import Client
from tensorferry.checkpointing.keeper.generations import Generations, KeeperFull
from tensorferry.checkpointing.keeper.snapshot import Snapshot
from tensorferry.errors import SystemRefused

pytestmark = pytest.mark.process


MIB = 1 << 20
FIELDS = {"path": "/ckpt/x/1", "job": "/ckpt/x", "rank": 0, "world_size": 1, "step": 1, "began": 1}
FIELDS |= {"location": "0" * 16, "kind": "keep", "version": handover.VERSION, "control": []}


def test_what_is_reserved_is_given_back_once_whatever_happens():
    held = Generations[None](100, 2)
    first, second = held.reserve(30), held.reserve(40)
    assert held.used == 70
    with contextlib.suppress(KeeperFull), first:
        raise KeeperFull("it did not come")
    for _ in range(3):
        first.close()
        assert held.used == 40
    second.close()
    second.close()
    assert held.used == 0


def test_a_look_at_the_room_evicts_nothing():
    held = Generations[None](100, 1)
    one = Snapshot("j", "/j/1", "a", 0, 1, 1, 1)
    kept = held.add(one, 60, None)
    other = Snapshot("j", "/j/2", "b", 0, 1, 2, 2)
    held.check_room(other, 90)
    with pytest.raises(KeeperFull):
        held.check_room(other, 101)
    assert list(held) == [kept]


def many(count: int) -> dict:
    return {f"layer.{number}": torch.tensor([float(number)]) for number in range(count)}


def test_a_copy_that_cannot_fit_is_not_fetched_and_leaves_the_count_alone(folder):
    """Its tensors would fit, and what describes them would not: it was given back twice, and fetched for ever."""
    with KeeperAtWork(folder, name="two"), Keeper("two") as two:
        offered(two, many(4000), "/ckpt/large/1")
        large = two.held()[0]
        asked = two.status()["served"]
        with KeeperAtWork(folder, "--memory", str(large.nbytes - 20_000), name="one") as process, Keeper("one") as one:
            one.set_buddies([two.address()])
            eventually("it is said why", lambda: "is not copied, and tried again" in process.said())
            assert "larger than all the memory" in process.said()
            # One that fits is copied all the same, and at once.
            offered(two, {"w": torch.arange(9)}, "/ckpt/small/1")
            small = eventually("it is copied", lambda: [s for s in one.held() if not s.remote])
            looked = 0
            for _ in range(3):
                # Each answer is a new look at the list.
                one.held(ask_buddies=True)
                looked += 1
                assert one.status()["used"] == sum(s.nbytes for s in one.held() if not s.remote) == small[0].nbytes
            assert looked == 3
            # Lists and the small one.
            assert two.status()["served"] - asked < large.nbytes // 2
            assert process.said().count("larger than all the memory") == 1


def test_a_reservation_ends_with_the_partner(folder):
    """Whoever is not to be copied any more leaves nothing that is counted, wherever its copy was."""
    with (
        KeeperAtWork(folder, "--memory", "1G", name="one"),
        KeeperAtWork(folder, "--max-bandwidth", "8M", name="two"),
        Keeper("one") as one,
        Keeper("two") as two,
    ):
        offered(two, {"w": torch.zeros(16 * MIB)}, "/ckpt/large/1")
        for _ in range(3):
            one.set_buddies([two.address()])
            eventually("it is being fetched", lambda: one.status()["used"] > 0)
            one.set_buddies([])
            eventually("nothing is counted", lambda: one.status()["used"] == 0)


def table(rows: int) -> bytes:
    """Returns a valid table of ``rows`` entries without bytes."""
    names = np.char.zfill(np.arange(rows).astype("S8"), 8)
    parts = [
        np.array([rows, 8 * rows, rows], "<u8"),
        np.arange(8, 8 * rows + 1, 8, dtype="<u8"),
        np.full(rows, 1, "u1"),
        np.ones(rows, "u1"),
        np.full(rows, ord("0"), "u1"),
        np.zeros(rows, "<u8"),
        np.zeros(rows, "<u4"),
        np.zeros(rows, "<u8"),
        np.zeros(rows, "<u8"),
        names,
    ]
    return b"".join(part.tobytes() for part in parts)


def memfd(data: bytes) -> int:
    fd = os.memfd_create("table", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with memoryview(data) as left:
        at = 0
        while at < len(left):
            at += os.write(fd, left[at:])
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def give(sock: socket.socket, save_id: str, contents: int, size: int) -> None:
    entries = memfd(bytes(4096))
    text = json.dumps({**FIELDS, "save_id": save_id, "table": size}).encode()
    sock.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [contents, entries]))])
    os.close(entries)


def peak(process: KeeperAtWork) -> int:
    """Bytes of memory that the process has had at most."""
    for line in Path(f"/proc/{process.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the keeper is gone")


def limit_address_space(process: KeeperAtWork, spare: int) -> None:
    """Lets the process map ``spare`` bytes more than it has now."""
    pages = int(Path(f"/proc/{process.process.pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + spare
    resource.prlimit(process.process.pid, resource.RLIMIT_AS, (limit, limit))


def test_a_table_that_costs_more_than_the_keeper_may_hold_is_refused_before_it_is_read(folder):
    data = table(3_000_000)
    contents = memfd(data)
    with KeeperAtWork(folder, "--memory", "512M") as process, Keeper() as keeper:
        offered(keeper, {"w": torch.arange(9)}, "/ckpt/good/1")
        before = peak(process)
        with connected(process) as sock:
            give(sock, "large", contents, len(data))
            answer = handover.receive(sock)
            assert answer.kind == "refused"
            assert "--memory" in answer.fields["error"]
        assert peak(process) < before + len(data) // 2
        assert loaded(keeper, keeper.held(job="/ckpt/good")[0])["w"].tolist() == list(range(9))
    os.close(contents)


@pytest.mark.nightly
def test_others_are_answered_while_a_long_table_is_read_and_its_cost_is_counted(folder):
    data = table(600_000)
    contents = memfd(data)
    with KeeperAtWork(folder, "--memory", "4G") as process, Keeper() as keeper, connected(process) as sock:
        before = process.resident()
        give(sock, "long", contents, len(data))
        os.close(contents)
        reserved = eventually("it has arrived", lambda: keeper.status()["used"])
        assert reserved == cost.Cost(len(data) + 4096, len(data)).reading
        assert select.select([sock], [], [], 0)[0] == [], "it was read before anything else was answered"
        assert handover.receive(sock).kind == "kept"
        (kept,) = keeper.held()
        assert kept.nbytes == keeper.status()["used"]
        with contextlib.suppress(Exception):
            keeper.open(kept)
        assert process.resident() - before < kept.nbytes


@pytest.mark.parametrize("spare", [40, 100, 250])
def test_a_keeper_with_little_address_space_refuses_what_it_has_none_for(folder, spare):
    data = table(1_000_000)
    contents = memfd(data)
    with KeeperAtWork(folder, "--memory", "4G") as process, Keeper() as keeper:
        offered(keeper, {"w": torch.arange(9)}, "/ckpt/good/1")
        limit_address_space(process, spare * MIB)
        for number in range(4):
            with connected(process) as sock:
                give(sock, f"n{number}", contents, len(data))
                answer = handover.receive(sock)
                assert answer.kind == "refused"
                assert "cannot have" in answer.fields["error"]
        assert process.process.poll() is None
        assert loaded(keeper, keeper.held(job="/ckpt/good")[0])["w"].tolist() == list(range(9))
    os.close(contents)


def test_a_buddys_snapshot_for_which_there_is_no_address_space_is_not_copied(folder):
    with (
        KeeperAtWork(folder, "--memory", "4G", name="one") as process,
        KeeperAtWork(folder, name="two"),
        Keeper("one") as one,
        Keeper("two") as two,
    ):
        offered(one, {"w": torch.arange(9)}, "/ckpt/good/1")
        offered(two, {"w": torch.zeros(100 * MIB)}, "/ckpt/large/1")
        limit_address_space(process, 200 * MIB)
        one.set_buddies([two.address()])
        eventually("it is said why", lambda: "cannot have" in process.said())
        assert process.process.poll() is None, process.said()
        assert loaded(one, one.held(job="/ckpt/good")[0])["w"].tolist() == list(range(9))
        eventually("nothing is counted for it", lambda: one.status()["used"] < MIB)


def test_what_cannot_be_had_is_an_error_that_says_so():
    cost.probe(0)
    with pytest.raises(SystemRefused, match="cannot have"):
        cost.probe(1 << 60)


def test_an_offer_that_was_sent_is_the_keepers_whatever_a_signal_handler_raises(folder, monkeypatch):
    def handle(*_):
        raise TimeoutError("the handler")

    def interrupted(*args):
        send(*args)
        monkeypatch.setattr(handover, "send", send)
        signal.raise_signal(signal.SIGUSR1)

    send, before, told = handover.send, signal.signal(signal.SIGUSR1, handle), Told()
    try:
        with KeeperAtWork(folder), Keeper() as keeper:
            monkeypatch.setattr(handover, "send", interrupted)
            keeper.offer(staged({"w": torch.ones(4)}), told)
            eventually("the keeper has it", lambda: len(keeper.held()) == 1)
            assert told.times == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_process_that_cannot_be_watched_for_want_of_descriptors_has_not_ended(monkeypatch):
    def refused(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    ended = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(ended, 0)
    monkeypatch.setattr(os, "pidfd_open", refused)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not Client(ours, os.getpid()).has_ended()
        assert Client(ours, ended).has_ended()
        # In another container, processes have no number here.
        assert Client(ours, 0).has_ended()
