"""What a broken or hostile process of the same node can do to a keeper: nothing that others notice."""

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
import time

import pytest
import torch

from keepers import PATIENCE, KeeperAtWork, connected, eventually, loaded, offered, staged
from tensorferry._native import SharedBuffer
from tensorferry.checkpointing import handover
from tensorferry.checkpointing.handover import Handover, Message
from tensorferry.checkpointing.keeper.client import Keeper

pytestmark = pytest.mark.process


MIB = 1 << 20
FIELDS = {"path": "/ckpt/x/1", "job": "/ckpt/x", "save_id": "a", "rank": 0, "world_size": 1, "step": 1, "began": 1}
FIELDS |= {"location": "0" * 16}


@pytest.fixture
def at_work(folder):
    """A keeper that holds a snapshot, and must still hold it, unharmed, at the end."""
    state = {"w": torch.arange(1 << 18)}
    with KeeperAtWork(folder, "--memory", "64M") as process, Keeper() as keeper:
        told = offered(keeper, state, "/good/run/step-1")
        resident = process.resident()
        yield process
        assert process.process.poll() is None, process.said()
        assert torch.equal(loaded(keeper, keeper.held(job="/good/run")[0])["w"], state["w"])
        assert told.times == 0
        assert process.resident() < resident + 32 * MIB
        assert "Traceback" not in process.said()


def send(sock: socket.socket, fields: dict, descriptors: list[int]) -> None:
    text = json.dumps({"version": handover.VERSION, **fields}).encode()
    sock.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])


def is_cut(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass
    return True


def memfd(nbytes: int, *, sealed: bool) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def test_garbage_ends_its_own_connection(at_work):
    chance = random.Random(3)
    messages = [
        b"\0",
        b"{",
        b"[]",
        b"{}",
        b'{"kind": 5, "version": 2}',
        b'{"kind": "keep", "version": 2}',
        b'{"kind": "status", "version": 999}',
        b'{"kind": "nothing", "version": 2}',
        b'{"kind": "taken", "version": 2}',
        b'{"kind": "held", "version": 2, "rank": NaN, "job": [], "ask_buddies": 7}',
        b'{"kind": "take", "version": 2, "job": {}, "save_id": [], "rank": 1e400}',
        b'{"kind": "done", "version": 2, "job": {}, "save_id": [], "rank": {}}',
        b'{"kind": "buddies", "version": 2, "buddies": 7}',
        b'{"kind": "buddies", "version": 2, "buddies": [7, "x", null]}',
        b"[" * 60000,
        *(chance.randbytes(chance.randrange(1, 5000)) for _ in range(30)),
    ]
    for message in messages:
        with connected(at_work) as sock:
            sock.send(message)
            sock.shutdown(socket.SHUT_WR)
            assert is_cut(sock)


def test_memory_that_can_shrink_is_not_touched(at_work):
    contents, entries = memfd(4096, sealed=True), memfd(MIB, sealed=False)
    with connected(at_work) as sock:
        send(sock, {**FIELDS, "kind": "keep", "table": 24, "control": []}, [contents, entries])
        os.ftruncate(entries, 0)
        assert is_cut(sock)
    for fd in (contents, entries):
        os.close(fd)


def test_wrong_lengths_tables_and_descriptors_are_refused(at_work):
    small, large, pipe = memfd(4096, sealed=True), memfd(1 << 40, sealed=True), os.pipe()
    cases = [
        ({"table": 24, "control": []}, [large]),
        ({"table": 24, "control": []}, [small, large]),
        ({"table": 1 << 40, "control": []}, [small]),
        ({"table": -1, "control": []}, [small]),
        ({"table": 24, "control": [["x", 1 << 61]]}, [small]),
        ({"table": 24, "control": [["x" * 5000, 1]]}, [small]),
        ({"table": 24, "control": "x"}, [small]),
        ({"table": 8, "control": []}, [small]),
        ({"table": 24, "control": []}, [pipe[0]]),
        ({"table": 24, "control": []}, [small] * 200),
        ({"table": 24, "control": []}, []),
        ({}, [small] * 10),
    ]
    for fields, descriptors in cases:
        with connected(at_work) as sock:
            send(sock, {**FIELDS, "kind": "keep", **fields}, descriptors)
            sock.shutdown(socket.SHUT_WR)
            assert is_cut(sock)
    for fd in (small, large, *pipe):
        os.close(fd)
    eventually("no descriptor stays", lambda: at_work.descriptors() < 40)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 1},
        {"rank": -1},
        {"rank": "0"},
        {"world_size": 0},
        {"world_size": 1 << 40},
        {"save_id": ""},
        {"save_id": "a/b"},
        {"save_id": None},
        {"path": ""},
        {"path": "x" * 9000},
        {"job": "\u00e9" * 3000},
        {"path": "a\nb"},
        {"job": 7},
        {"step": 1 << 70},
        {"step": "1"},
        {"began": "now"},
        {"began": 1e300},
        {"began": 1 << 63},
        {"location": None},
        {"location": "here"},
        {"path": "relative/1"},
    ],
)
def test_a_snapshot_that_is_not_described_is_refused_by_name(at_work, wrong):
    given = staged({"w": torch.ones(5)})
    with connected(at_work) as sock:
        handover.send(sock, Handover("keep", {**FIELDS, **wrong}, given.rows, given.control, given.buffers))
        answer = handover.receive(sock)
        assert answer.kind == "refused"
        assert next(iter(wrong)) in answer.fields["error"]
        # The connection goes on.
        handover.send(sock, Handover("keep", FIELDS, given.rows, given.control, given.buffers))
        assert handover.receive(sock).kind == "kept"


def test_a_state_with_a_wrong_manifest_is_refused(at_work):
    given = staged({"w": torch.ones(5)})
    with connected(at_work) as sock:
        for control in ([("__tensorferry__/manifest", b"{}")], [("w", b"1")], [("x", b""), ("x", b"")]):
            handover.send(sock, Handover("keep", FIELDS, given.rows, control, given.buffers))
            assert handover.receive(sock).kind == "refused"


def test_a_client_that_never_reads_is_disconnected(at_work):
    with connected(at_work) as sock:
        sock.settimeout(1)
        with contextlib.suppress(OSError):
            for _ in range(200_000):
                handover.send(sock, Message("held"))
        eventually("it is cut", lambda: "does not read its answers" in at_work.said())


def test_thousands_of_connections_do_not_keep_others_out(at_work):
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.settimeout(PATIENCE)
            with contextlib.suppress(OSError):
                sock.connect(str(at_work.folder / "keeper-default.sock"))
        with Keeper() as keeper:
            assert len(keeper.held(job="/good/run")) == 1
    eventually("they are gone", lambda: at_work.descriptors() < 60)


def test_a_client_that_leaves_in_the_middle_leaves_nothing(at_work):
    with Keeper() as keeper:
        one = keeper.held()[0]
        for _ in range(50):
            with connected(at_work) as sock:
                handover.send(sock, Message("take", one.named()))
            with connected(at_work) as sock:
                handover.send(sock, Message("held", {"ask_buddies": True}))
        eventually("nobody is connected", lambda: keeper.status()["clients"] <= 2)
    eventually("no descriptor stays", lambda: at_work.descriptors() < 40)


def test_another_user_is_turned_away(at_work):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    code = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
path = sys.argv[1]
os.setgid(65534); os.setuid(65534)
try:
    sock.connect(path)
    sock.send(b'{"kind": "status", "version": 2}')
    print(sock.recv(1 << 16))
except PermissionError:
    print("permission")
except ConnectionError:
    print("cut")
"""
    path = at_work.folder / "keeper-default.sock"

    def attempt():
        return subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=PATIENCE)

    assert attempt().stdout == "permission\n"
    # Somebody opened the folder: the kernel's word on who connects still counts.
    opened = [*[p for p in (at_work.folder, *at_work.folder.parents) if p.stat().st_uid == 0 and p != p.parent], path]
    modes = [(p, p.stat().st_mode & 0o7777) for p in opened]
    try:
        for p in opened:
            p.chmod(p.stat().st_mode | 0o777 if p == path else p.stat().st_mode | 0o711)
        assert attempt().stdout in ("b''\n", "cut\n")
        eventually("it is logged", lambda: "of user 65534 was turned away" in at_work.said())
    finally:
        for p, mode in modes:
            p.chmod(mode)


def test_the_keeper_of_another_user_is_refused_by_an_error_that_says_so(at_work):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    code = """
import os
from tensorferry.checkpointing.keeper.client import Keeper
from tensorferry.errors import SystemRefused
os.setgid(65534); os.setuid(65534)
try:
    Keeper().held()
except SystemRefused as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert str(at_work.folder) in done.stdout, done.stderr


def test_a_socket_of_another_user_is_not_believed(folder):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    (folder / "keeper-default.sock").touch()
    from tensorferry.errors import SystemRefused

    with Keeper() as keeper, pytest.raises(SystemRefused, match="folder of this user"):
        keeper.held()


def test_one_client_does_not_hold_up_another(at_work):
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            sock = stack.enter_context(connected(at_work))
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    handover.send(sock, Message("held"))
        began = time.monotonic()
        with Keeper() as keeper:
            assert keeper.held(job="/good/run")
        assert time.monotonic() - began < PATIENCE


def test_buffers_that_are_handed_over_again_and_again_do_not_pile_up(at_work):
    buffer = SharedBuffer(MIB)
    given = staged({"w": torch.ones(5)})
    with connected(at_work) as sock:
        for number in range(100):
            fields = {**FIELDS, "save_id": f"n{number}"}
            handover.send(sock, Handover("keep", fields, given.rows, given.control, [*given.buffers, buffer]))
            said = {handover.receive(sock).kind for _ in range(1 + (number >= 2))}
            assert said == ({"kept", "released"} if number >= 2 else {"kept"})
    eventually("no descriptor stays", lambda: at_work.descriptors() < 50)


def test_what_a_silent_client_gave_and_newer_snapshots_have_displaced_goes_once(at_work):
    """The client has closed its connection without a word, and lives."""
    given = {number: staged({"w": torch.ones(5)}) for number in range(5)}

    def keep(sock: socket.socket, number: int, save_id: str, one: Handover) -> None:
        job = f"/ckpt/job{number}"
        fields = {**FIELDS, "path": f"{job}/1", "job": job, "save_id": save_id}
        handover.send(sock, Handover("keep", fields, one.rows, one.control, one.buffers))
        assert handover.receive(sock).kind == "kept"

    with connected(at_work) as sock:
        for number, one in given.items():
            keep(sock, number, "a", one)
    with connected(at_work) as sock, Keeper() as keeper:
        for save_id in ("b", "c"):
            for number in range(4):
                keep(sock, number, save_id, staged({"w": torch.ones(5)}))
        eventually("it is seen that the client lives", lambda: "left without a word" in at_work.said())
        kept = {(one.job, one.save_id) for one in keeper.held() if one.job != "/good/run"}
        assert kept == {(f"/ckpt/job{n}", save_id) for n in range(4) for save_id in "bc"}
