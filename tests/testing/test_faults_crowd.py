"""The fault suite's crowd of idle connections and its silent name server work, and leave nothing behind."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tensorferry.testing.matrix.idle_crowd import IdleCrowd, crowding, local_sockets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.nightly


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as opened:
        opened.settimeout(20)
        yield opened


def metadata(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}/0f/checkpoint/"


@pytest.mark.process
def test_a_crowd_connects_sends_nothing_and_leaves(listener: socket.socket) -> None:
    with crowding(metadata(listener), os.getpid(), IdleCrowd(20)) as opened:
        members = [listener.accept()[0] for _ in range(20)]
        assert opened() == 20
        for member in members:
            member.setblocking(False)
            with pytest.raises(BlockingIOError):
                member.recv(1)
    for member in members:
        with member:
            member.settimeout(20)
            assert member.recv(1) == b""


@pytest.mark.process
def test_a_crowd_reopens_connections_that_the_source_closes(listener: socket.socket) -> None:
    with crowding(metadata(listener), os.getpid(), IdleCrowd(1)):
        for _ in range(3):
            listener.accept()[0].close()


@pytest.mark.process
def test_half_of_a_local_crowd_is_at_the_socket_without_a_port(listener: socket.socket) -> None:
    name = f"tensorferry-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{name}")
        local.listen(64)
        local.settimeout(20)
        assert f"@{name}" in local_sockets(os.getpid())
        with crowding(metadata(listener), os.getpid(), IdleCrowd(8, local=True)) as opened:
            if local_sockets(os.getpid()) == [f"@{name}"]:  # no other part of this process listens on one
                for accepting in (listener, local):
                    for _ in range(4):
                        accepting.accept()[0].close()
            assert opened() == 8


def test_the_local_sockets_of_others_are_left_alone() -> None:
    name = f"tensorferry-test-{secrets.token_hex(8)}"
    code = (
        f"import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0{name}'); s.listen(); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert local_sockets(other.pid) == [f"@{name}"]
        assert f"@{name}" not in local_sockets(os.getpid())
        other.communicate(b"\n", timeout=20)


def test_a_source_without_a_local_socket_has_no_local_crowd(listener: socket.socket) -> None:
    code = "print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with crowding(metadata(listener), other.pid, IdleCrowd(8, local=True)) as opened:
            assert opened() == 0
        other.communicate(b"\n", timeout=20)


ASKS = """
import os, socket, sys, time
from pathlib import Path
user, asked = int(sys.argv[1]), Path(sys.argv[2])
from tensorferry.testing.matrix.name_server import NAME, SilentNameServer
from tensorferry.testing.matrix.scenario import LeftOut
os.setuid(user)
try:
    SilentNameServer(asked, 2.0)
except LeftOut as reason:
    print("left out:", reason)
    sys.exit()
start = time.monotonic()
try:
    socket.getaddrinfo(NAME, 80)
except OSError:
    print("silent", time.monotonic() - start >= 1.5, asked.exists(), socket.gethostbyname("localhost"))
"""


@pytest.mark.parametrize("user", ["own", "nobody"])
def test_a_silent_name_server_is_asked_and_does_not_answer(user: str, tmp_path: Path) -> None:
    before = time.time()
    resolver = _content("/etc/resolv.conf")
    if user == "nobody" and os.getuid():
        pytest.skip("only root can change its user")
    tmp_path.chmod(0o777)
    number = 65534 if user == "nobody" else os.getuid()
    command = [sys.executable, "-c", ASKS, str(number), str(tmp_path / "asked")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    if done.stdout.startswith("left out:"):
        pytest.skip(done.stdout.strip())
    assert done.stdout.split() == ["silent", "True", "True", "127.0.0.1"], done
    assert _content("/etc/resolv.conf") == resolver
    assert time.time() - before < 90


def _content(path: str) -> str:
    with open(path) as file:
        return file.read()
