"""What broken or hostile processes and buddies can do to a keeper: nothing that others notice."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import random
import socket
import subprocess
import sys

import pytest
import torch

from keepers import PATIENCE, KeeperAtWork, Told, connected, eventually, loaded, offered, staged
from tensorferry._native import Table
from tensorferry.checkpointing import handover
from tensorferry.checkpointing.handover import Handover, Message
from tensorferry.checkpointing.keeper import buddies
from tensorferry.checkpointing.keeper.client import Keeper
from tensorferry.errors import ProtocolError
from tensorferry.net import serve
from tensorferry.net.network import Network
from tensorferry.storage.container import Container

pytestmark = pytest.mark.process

MIB = 1 << 20
SECRET = "a secret of more than sixteen bytes"
FIELDS = {"path": "/ckpt/x/1", "job": "/ckpt/x", "save_id": "a", "rank": 0, "world_size": 1, "step": 1, "began": 1}
FIELDS |= {"location": "0" * 16}


class Liar:
    """A buddy whose list says what a test wants, and which serves what a test wants."""

    def __init__(self) -> None:
        self._server, self.host = serve.start(2.0, Network(secret=SECRET, interface="127.0.0.1"))
        self._list, self._shelves = self._server.shelf(buddies.LIST), []
        self.address = self._list.url(self.host).removeprefix("http://").split("/")[0]
        self.lists()

    def serves(self, state: dict):
        self._shelves.append(self._server.shelf(None))
        staged(state).container().publish(self._shelves[-1], 1)
        return self._shelves[-1]

    def entry(self, number: int = 0, shelf=None, **fields) -> dict:
        described = FIELDS | {
            "job": f"/liar/{number}",
            "path": f"/liar/{number}/1",
            "began": number + 1,
            "nbytes": 8192,
        }
        described["metadata"] = shelf.url(self.host) if shelf else f"http://x:1/{'a' * 32}/checkpoint/"
        return described | {"origin": "local"} | fields

    def lists(self, *snapshots: dict) -> None:
        self.says(json.dumps({"version": buddies._VERSION, "snapshots": snapshots}).encode())

    def says(self, text: bytes) -> None:
        Container(Table(), None, True, [(buddies._ENTRY, text)]).publish(self._list, buddies.STEP)

    def close(self) -> None:
        self._server.shutdown(1.0)


@pytest.fixture
def liar():
    with contextlib.closing(Liar()) as made:
        yield made


@pytest.fixture
def at_work(folder, liar):
    """A keeper with a liar for a buddy: it must hold what it holds, unharmed, at the end, and count nothing else."""
    state = {"w": torch.arange(1 << 18)}
    options = ["--memory", "64M", "--buddy", liar.address]
    with KeeperAtWork(folder, *options, secret=SECRET) as process, Keeper(secret=SECRET) as keeper:
        told = offered(keeper, state, "/good/run/step-1")
        resident = process.resident()
        yield process, keeper
        assert process.process.poll() is None, process.said()
        (good,) = [one for one in keeper.held(job="/good/run") if one.origin == "local" and not one.remote]
        assert torch.equal(loaded(keeper, good)["w"], state["w"])
        assert told.times == 0
        assert process.resident() < resident + 48 * MIB
        assert "Traceback" not in process.said()
        eventually("no descriptor stays", lambda: process.descriptors() < 60)
        kept = sum(one.nbytes for one in keeper.held() if not one.remote)
        eventually("only what is held is counted", lambda: keeper.status()["used"] == kept)


def is_cut(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass
    return True


def memfd(nbytes: int, *, sealed: bool = True) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def test_garbage_ends_its_own_connection(at_work):
    chance = random.Random(3)
    version = f'"version": {handover.VERSION}'.encode()
    messages = [
        b"{", b"[]", b"{}", b"[" * 60000,
        b'{"kind": "keep", %b}' % version,
        b'{"kind": "held", %b, "rank": NaN}' % version,
        b'{"kind": "take", %b, "key": [[], 1e400]}' % version,
        *(chance.randbytes(chance.randrange(1, 5000)) for _ in range(30)),
    ]  # fmt: skip
    for message in messages:
        with connected(at_work[0]) as sock:
            sock.send(message)
            sock.shutdown(socket.SHUT_WR)
            assert is_cut(sock)


def test_wrong_memory_is_refused(at_work):
    small, soft = memfd(4096), memfd(MIB, sealed=False)
    lists = [memfd(1 << 40)], [small, soft], [os.pipe()[0]], [small] * 200
    for fields, descriptors in (*[({"table": 24, "control": []}, one) for one in lists], ({}, [small] * 10)):
        with connected(at_work[0]) as sock:
            text = json.dumps({"version": handover.VERSION, **FIELDS, "kind": "keep", **fields}).encode()
            sock.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
            sock.shutdown(socket.SHUT_WR)
            assert is_cut(sock)
    given = staged({"w": torch.ones(5)})
    with connected(at_work[0]) as sock:
        for fields, control in (
            (FIELDS | {"rank": 7}, given.control),
            (FIELDS, [("__tensorferry__/manifest", b"{}")]),
            (FIELDS, [("x", b""), ("x", b"")]),
        ):
            handover.send(sock, Handover("keep", fields, given.rows, control, given.buffers))
            assert handover.receive(sock).kind == "refused"
        # The connection goes on.
        handover.send(sock, Handover("keep", FIELDS, given.rows, given.control, given.buffers))
        assert handover.receive(sock).kind == "kept"


def test_clients_that_do_not_read_or_leave_in_the_middle_hold_nobody_up(at_work):
    process, keeper = at_work
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            sock = stack.enter_context(connected(process))
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    handover.send(sock, Message("held"))
        assert keeper.held(job="/good/run")
    key = keeper.held()[0].key
    for _ in range(50):
        with connected(process) as sock:
            handover.send(sock, Message("take", {"key": key}))
    eventually("nobody is connected", lambda: keeper.status()["clients"] <= 2)
    with connected(process) as sock:
        sock.settimeout(1)
        with contextlib.suppress(OSError):
            for _ in range(200_000):
                handover.send(sock, Message("held"))
        eventually("it is cut", lambda: "does not read its answers" in process.said())


def test_a_message_of_another_version_is_answered_by_an_error_that_says_so(at_work, monkeypatch):
    process, keeper = at_work
    with monkeypatch.context() as patch:
        patch.setattr(handover, "VERSION", 1)
        with pytest.raises(ProtocolError, match=r"run one version of tensorferry"):
            keeper.held()
        told = Told()
        with Keeper() as other:
            other.offer(staged({"w": 1}), told)
            eventually("its memory comes back", lambda: told.times == 1)
    assert "run one version of tensorferry" in process.said()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_are_turned_away(at_work):
    process, _ = at_work
    code = """
import os, socket, sys
from tensorferry.checkpointing.keeper.client import Keeper
from tensorferry.errors import SystemRefused
os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
    try:
        sock.connect(sys.argv[1])
        sock.send(b'{"kind": "status", "version": 2}')
        print(sock.recv(1 << 16))
    except OSError as e:
        print(type(e).__name__)
try:
    Keeper().held()
except SystemRefused as e:
    print(e)
"""
    path = process.folder / "keeper-default.sock"
    command = [sys.executable, "-c", code, path]

    def attempt() -> str:
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout

    first, refused = attempt().splitlines()
    assert first == "PermissionError"
    assert str(process.folder) in refused
    # Somebody opened the folder: the kernel's word on who connects still counts.
    opened = [*[p for p in (process.folder, *process.folder.parents) if p.stat().st_uid == 0 and p != p.parent], path]
    modes = [(p, p.stat().st_mode & 0o7777) for p in opened]
    try:
        for p, mode in modes:
            p.chmod(mode | (0o777 if p == path else 0o711))
        assert attempt().splitlines()[0] in ("b''", "ConnectionResetError", "BrokenPipeError")
        eventually("it is logged", lambda: "of user 65534 was turned away" in process.said())
    finally:
        for p, mode in modes:
            p.chmod(mode)


def honest(liar: Liar, keeper: Keeper, *also: dict) -> None:
    """After its lies, a snapshot that is what the list says is copied."""
    state = {"w": torch.arange(99)}
    liar.lists(*also, liar.entry(500, liar.serves(state), job="/honest", path="/honest/1"))
    found = eventually("it is copied", lambda: [s for s in keeper.held(job="/honest") if not s.remote])
    assert torch.equal(loaded(keeper, found[0])["w"], state["w"])


def test_other_sizes_and_names_than_the_list_promises(at_work, liar):
    process, keeper = at_work
    large = liar.serves({"w": torch.zeros(8 * MIB // 4)})
    many = liar.serves({f"{n}": torch.zeros(1) for n in range(60_000)})
    sizes = [(large, 8192), (large, 65 * MIB), (large, 1 << 62), (many, 5000)]
    entries = [liar.entry(n, shelf, nbytes=size) for n, (shelf, size) in enumerate(sizes)]
    liar.lists(*entries)
    for number in range(len(sizes)):
        eventually("it is refused", lambda n=number: f"of /liar/{n} is not copied" in process.said())
    # Its entries may have the name of the node's own job, and be of one of its very saves.
    own = keeper.held(job="/good/run")[-1]
    small = liar.serves({"w": torch.zeros(9)})
    named = own.fields() | {"metadata": small.url(liar.host), "step": 1, "nbytes": 8192}
    entries += [named, *({**named, "save_id": f"e{n}", "began": own.began + 1 + n} for n in range(20))]
    # And a thousand that lead nowhere hold up none that leads somewhere.
    honest(liar, keeper, *(liar.entry(n) for n in range(900)), *entries)
    copies = [one for one in keeper.held(job="/good/run") if one.origin != "local" and not one.remote]
    assert len(copies) <= 2


@pytest.mark.parametrize(
    "text",
    [
        b" ",
        b'{"version": 1, "snapshots": []}',
        b'{"version": %d, "snapshots": [{}]}' % buddies._VERSION,
        pytest.param(b'{"version": 3, "snapshots": ' + b"[" * 5_000_000, marks=pytest.mark.nightly),
        pytest.param(b" " * (17 << 20), marks=pytest.mark.nightly),
    ],
    ids=range(5),
)
def test_lists_that_are_none(at_work, liar, text):
    _, keeper = at_work
    liar.says(text)
    eventually("it is said", lambda: keeper.status()["buddies"][0]["error"])
    assert all(one.origin == "local" for one in keeper.held())
    honest(liar, keeper)


def test_addresses_elsewhere_are_not_asked(at_work, liar):
    _, keeper = at_work
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.0)
        port = elsewhere.getsockname()[1]
        addresses = [f"http://{user}127.0.0.1:{port}/{'a' * 32}/checkpoint/" for user in ("", "x@")]
        honest(liar, keeper, *(liar.entry(n, metadata=address) for n, address in enumerate(addresses)))
        assert all(f":{port}/" not in one.metadata for one in keeper.held())
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
    for wrong in ("http://127.0.0.1/checkpoint/", "file:///etc/passwd", "http://a/../b/checkpoint/"):
        liar.lists(liar.entry(1, metadata=wrong))
        eventually("it is said", lambda: "without an address" in keeper.status()["buddies"][0]["error"])
    honest(liar, keeper)
