"""Buddies that lie, change their minds, trickle, or die in the middle: the keeper that copies from them goes on."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import pytest
import torch

from keepers import KeeperAtWork, eventually, loaded, offered, staged
from nights import mostly_at_night
from tensorferry._native import Table
from tensorferry.checkpointing.keeper import index
from tensorferry.checkpointing.keeper.client import Keeper
from tensorferry.net import serve
from tensorferry.net.options import ServerOptions
from tensorferry.storage.container import Container

pytestmark = pytest.mark.process


MIB = 1 << 20
OPTIONS = ServerOptions(
    secret=None, tls=False, same_host=None, interface="127.0.0.1", advertise=None, max_bandwidth=None
)


class Liar:
    """A buddy whose list says what a test wants, and which serves what a test wants."""

    def __init__(self) -> None:
        self._server, self.host = serve.start(2.0, OPTIONS)
        self._list = self._server.shelf(None)
        self.url = self._list.url(self.host)

    def serves(self, state: dict, step: int = 1):
        given = staged(state)
        shelf = self._server.shelf(None)
        given.container().publish(shelf, step)
        return shelf

    def entry(self, number: int = 0, shelf=None, **fields) -> dict:
        described = {"job": "/liar", "location": "0" * 16, "path": f"/liar/{number}", "save_id": f"s{number}"}
        described |= {"rank": 0, "world_size": 1, "step": 1, "began": number + 1, "nbytes": 8192, "origin": "local"}
        described["metadata"] = shelf.url(self.host) if shelf else f"http://{'x'}:1/{'a' * 32}/checkpoint/"
        return described | fields

    def lists(self, *snapshots: dict) -> None:
        self.says(json.dumps({"version": index._VERSION, "snapshots": snapshots}).encode())

    def says(self, text: bytes) -> None:
        Container(Table(), None, True, [(index._ENTRY, text)]).publish(self._list, index.STEP)

    def close(self) -> None:
        self._server.shutdown(1.0)


@pytest.fixture
def victim(folder):
    """A keeper with a liar for a buddy: what it holds must be there at the end, and nothing else may be counted."""
    state = {"w": torch.arange(1 << 16)}
    with (
        contextlib.closing(Liar()) as liar,
        KeeperAtWork(folder, "--memory", "32M") as process,
        Keeper() as keeper,
    ):
        told = [offered(keeper, state, f"/good/run/step-{n}") for n in range(2)]
        own = [one.key for one in keeper.held()]
        resident = process.resident()
        liar.lists()
        keeper.set_buddies([liar.url])
        yield liar, process, keeper
        assert process.process.poll() is None, process.said()
        assert [one.times for one in told] == [0, 0]
        held = [one for one in keeper.held() if one.origin == "local" and not one.remote]
        assert [one.key for one in held] == own
        assert torch.equal(loaded(keeper, held[1])["w"], state["w"])
        assert "Traceback" not in process.said()
        assert process.resident() < resident + 48 * MIB
        keeper.set_buddies([])
        kept = sum(one.nbytes for one in keeper.held())
        eventually("only what is held is counted", lambda: keeper.status()["used"] == kept)
        assert kept <= 32 * MIB


def honest(liar: Liar, keeper: Keeper, *also: dict) -> None:
    """After its lies, a snapshot that is what the list says is copied."""
    state = {"w": torch.arange(99)}
    shelf = liar.serves(state)
    liar.lists(*also, liar.entry(500, shelf, job="/honest", path="/honest/1"))
    found = eventually("it is copied", lambda: [s for s in keeper.held(job="/honest") if not s.remote])
    assert torch.equal(loaded(keeper, found[0])["w"], state["w"])


def test_other_sizes_than_the_list_promises(victim):
    liar, process, keeper = victim
    large = liar.serves({"w": torch.zeros(8 * MIB // 4)})
    small = liar.serves({"w": torch.zeros(4)})
    many = liar.serves({f"{n}": torch.zeros(1) for n in range(60_000)})
    sizes = [(large, 100), (small, 32 * MIB), (large, 1 << 62), (many, 5000)]
    entries = [liar.entry(n, shelf, nbytes=size, job=f"/liar/{n}") for n, (shelf, size) in enumerate(sizes)]
    liar.lists(*entries)
    for number in range(len(sizes)):
        said = f"step 1 of rank 0 of /liar/{number} is not copied"
        eventually(f"number {number} is refused", lambda said=said: said in process.said())
    assert "the list says 100" in process.said()
    assert "header and control entries of the source have" in process.said()
    honest(liar, keeper, *entries)


def test_the_job_and_the_saves_of_others(victim):
    """Copies with the name of the node's own job displace none of its snapshots, and are not taken for one of them."""
    liar, _, keeper = victim
    own = keeper.held()[-1]
    shelf = liar.serves({"w": torch.zeros(9)})
    named = own.fields() | {"metadata": shelf.url(liar.host), "step": 1, "nbytes": 8192}
    entries = [named, *({**named, "save_id": f"e{n}", "began": own.began + 1 + n} for n in range(20))]
    liar.lists(*entries)
    eventually("they are copied", lambda: len([s for s in keeper.held() if s.origin != "local" and not s.remote]) >= 2)
    honest(liar, keeper, *entries)


@pytest.mark.parametrize(
    "text",
    mostly_at_night(
        [
            b"",
            b"{",
            b"[]",
            b'{"version": 1, "snapshots": []}',
            b'{"version": 2, "snapshots": {}}',
            b'{"version": 2, "snapshots": [7]}',
            b'{"version": 2, "snapshots": [{}]}',
            b'{"version": 2, "snapshots": [' + b"[]," * 1_000_000 + b"7]}",
            b'{"version": 2, "snapshots": ' + b"[" * 5_000_000,
            b'{"version": 2, "snapshots": [' + b'{"":1},' * 1_000_000 + b"7]}",
            b" " * (17 << 20),
        ],
        by_day=3,
    ),
)
def test_lists_that_are_none(victim, text):
    liar, _, keeper = victim
    liar.says(text or b" ")
    eventually("it is said", lambda: keeper.status()["buddies"][0]["error"])
    assert all(one.origin == "local" for one in keeper.held(ask_buddies=True))
    honest(liar, keeper)


def test_addresses_elsewhere_are_not_asked(victim):
    liar, process, keeper = victim
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.0)
        port = elsewhere.getsockname()[1]
        entries = [
            liar.entry(1, metadata=f"http://127.0.0.1:{port}/{'a' * 32}/checkpoint/"),
            liar.entry(2, metadata=f"http://x@127.0.0.1:{port}/{'a' * 32}/checkpoint/"),
        ]
        liar.lists(*entries)
        eventually("they are listed", lambda: keeper.held(job="/liar"))
        honest(liar, keeper, *entries)
        assert all(f":{port}/" not in one.metadata for one in keeper.held())
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
    for wrong in ("http://127.0.0.1/checkpoint/", "file:///etc/passwd", "http://a/../b/checkpoint/"):
        liar.lists(liar.entry(1, metadata=wrong))
        eventually("it is said", lambda: "without an address" in keeper.status()["buddies"][0]["error"])
    honest(liar, keeper)
    assert process.process.poll() is None


def test_a_thousand_entries_that_lead_nowhere_do_not_hold_up_the_one_that_does(victim):
    liar, _, keeper = victim
    honest(liar, keeper, *(liar.entry(n, job=f"/liar/{n}") for n in range(1000)))


def test_snapshots_that_change_under_the_same_address(victim):
    liar, _, keeper = victim
    shelf = liar.serves({"w": torch.zeros(MIB)})
    stop = threading.Event()

    def change() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            staged({"w": torch.full((MIB,), float(number))}).container().publish(shelf, 1)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for number in range(20):
            liar.lists(liar.entry(number, shelf, nbytes=5 * MIB))
            keeper.held(ask_buddies=True)
    finally:
        stop.set()
        thread.join()
    honest(liar, keeper)
    for one in keeper.held(job="/liar"):
        if not one.remote:
            values = loaded(keeper, one)["w"]
            assert torch.equal(values, torch.full_like(values, float(values[0])))


@pytest.mark.nightly
def test_a_buddy_that_only_trickles_holds_nobody_up(victim):
    _, _, keeper = victim
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stop = threading.Event()

        def trickle(sock: socket.socket) -> None:
            with sock, contextlib.suppress(OSError):
                sock.recv(4096)
                sock.sendall(b"HTTP/1.1 206 Partial Content\r\nX-A: ")
                while not stop.wait(0.05):
                    sock.sendall(b"x")

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=trickle, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            port = listening.getsockname()[1]
            keeper.set_buddies([f"http://127.0.0.1:{port}/{'a' * 32}/checkpoint/"])
            eventually("it is said", lambda: keeper.status()["buddies"][0]["error"])
            assert len(keeper.held(ask_buddies=True)) == 2
        finally:
            stop.set()
            listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.nightly
def test_buddies_that_are_killed_while_they_are_copied_leave_nothing_counted(folder):
    with KeeperAtWork(folder, "--memory", "256M", name="one") as process, Keeper("one") as one:
        for number in range(4):
            with KeeperAtWork(folder, "--max-bandwidth", "10M", name="two") as buddy, Keeper("two") as two:
                offered(two, {"w": torch.zeros(8 * MIB)}, f"/ckpt/{number}/1")
                one.set_buddies([two.address()])
                eventually("it is being copied", lambda: one.status()["used"] > 0)
                buddy.kill()
            eventually("nothing is counted", lambda: one.status()["used"] == 0)
            assert process.process.poll() is None
