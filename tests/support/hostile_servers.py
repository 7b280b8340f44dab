"""HTTP servers that mean harm to whoever asks them: what they serve, and how they serve it.

`SERVERS` has them by name. Each takes the metadata of an honest source, and is a context manager whose value is the
metadata of the hostile one. Some answer every request with the same bytes, some relay an honest source's answers and
change them, and some are real servers over hostile content.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import http.client
import json
import re
import threading
import urllib.parse
from typing import TYPE_CHECKING, Any

from exchange import Listener
from tensorferry._native import Server, Table
from tensorferry.storage import reserved
from tensorferry.storage.container import Container

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

#: Clears the screen, sets the title, writes to the clipboard, turns the text around; and a line of its own.
ESCAPES = "\x1b[2J\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07\u202e\x9b31m\r\nowned"
MIB = 1 << 20


def head_of(connection: socket.socket) -> bytes:
    """Reads a request up to its empty line."""
    found = b""
    while b"\r\n\r\n" not in found:
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionAbortedError("the client has gone")
        found += part
    return found


def flood(connection: socket.socket, part: bytes) -> None:
    """Sends the same bytes for as long as the client takes them."""
    while True:
        connection.sendall(part)


def answer(status: str, body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    """Returns an answer as it goes over the wire."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def part_of(total: int, body: bytes, *headers: str) -> bytes:
    """Returns an answer to the first request of a receive."""
    return answer("206 Partial Content", body, 'ETag: "e"', f"Content-Range: bytes 0-{len(body) - 1}/{total}", *headers)


def header(fields: dict[str, Any]) -> bytes:
    """Returns the header of a container."""
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 64)
    return len(text).to_bytes(8, "little") + text


def constant(data: bytes) -> Callable[[socket.socket], None]:
    """Answers every request with the same bytes."""

    def serve(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(data)

    return serve


def silent(connection: socket.socket) -> None:
    """Reads, and answers nothing."""
    while connection.recv(1 << 16):
        pass


def dripping(data: bytes, at_once: int = 0) -> Callable[[socket.socket], None]:
    """Sends the first bytes, and then one at a time."""

    def serve(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(data[:at_once])
        ended = threading.Event()
        for byte in data[at_once:]:
            connection.sendall(bytes([byte]))
            ended.wait(0.05)

    return serve


def endless(head: bytes, part: bytes) -> Callable[[socket.socket], None]:
    """Sends a head, and then the same bytes for ever."""

    def serve(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(head)
        flood(connection, part)

    return serve


def bomb() -> bytes:
    """64 MiB of zeros in 64 kB."""
    return gzip.compress(bytes(64 * MIB), 9)


def announced(nbytes: int) -> bytes:
    """The beginning of a container with one tensor of so many bytes."""
    about = header({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    return part_of(len(about) + nbytes, about + bytes(MIB - len(about)))


def serving_no_step() -> Callable[[socket.socket], None]:
    """Refuses each step, and claims to serve one that no number of a step can be."""
    said = "invalid checkpoint requested, serving 9999999999999999999 but got something else"
    return constant(answer(f"400 {said}", said.encode()))


def going_on() -> Callable[[socket.socket], None]:
    """Refuses each step, and claims to serve one more."""
    step = iter(range(1, 1 << 40))

    def serve(connection: socket.socket) -> None:
        while True:
            head_of(connection)
            said = f"invalid checkpoint requested, serving {next(step)} but got something else"
            connection.sendall(answer(f"400 {said}", said.encode()))

    return serve


#: Servers that answer by the connection alone.
ANSWERS: dict[str, Callable[[], Callable[[socket.socket], None]]] = {
    "silent": lambda: silent,
    "drips its head": lambda: dripping(b"HTTP/1.1 206 Partial Content\r\n" + b"X-Long: y\r\n" * 1000),
    "drips its body": lambda: dripping(part_of(MIB, b"\x08" * MIB), 120),
    "head without end": lambda: endless(b"HTTP/1.1 200 OK\r\n", b"X-More: and more\r\n" * 1000),
    "continues for ever": lambda: endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "refusal without end": lambda: endless(b"HTTP/1.1 500 No\r\n\r\n", b"x" * 65536),
    "chunks without end": lambda: endless(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n"
    ),
    "escapes": lambda: constant(f"HTTP/1.1 400 {ESCAPES}\r\nX-{ESCAPES}: y\r\n\r\n{ESCAPES}".encode()),
    "escapes first": lambda: constant(ESCAPES.encode() + b"\r\n\r\n"),
    "escapes in counters": lambda: constant(
        answer("200 OK", f'tensorferry_allowed{{x="{ESCAPES}"}} 1\ntensorferry_step 1{ESCAPES}9e999999\n'.encode())
    ),
    "a bomb": lambda: constant(answer("200 OK", bomb(), "Content-Encoding: gzip")),
    "a length beyond numbers": lambda: constant(answer("206 P", b"", length=10**30)),
    "a tensor of 2^50 bytes": lambda: constant(announced(1 << 50)),
    "another step each time": going_on,
    "a step beyond numbers": serving_no_step,
}


class Relay(Listener):
    """Relays an honest source's answers, one to a connection, after `change` was applied to them.

    `change` takes the path that was requested, the number of the request, and the answer; it returns another answer.
    """

    def __init__(self, metadata: str, change: Callable[[str, int, bytes], bytes]) -> None:
        self._source = urllib.parse.urlsplit(metadata)
        self._change = change
        self._lock = threading.Lock()
        self.requests = 0
        super().__init__(self._relay)
        self.metadata = self._source._replace(netloc=f"127.0.0.1:{self.port}").geturl()

    def _relay(self, connection: socket.socket) -> None:
        first, *lines = head_of(connection).decode("latin-1").split("\r\n")
        path = first.split(" ")[1]
        headers = dict(line.split(": ", 1) for line in lines if ": " in line)
        source = http.client.HTTPConnection("127.0.0.1", self._source.port or 0, timeout=10)
        with contextlib.closing(source):
            source.request("GET", path, headers=headers)
            got = source.getresponse()
            body = got.read()
        told = ("etag", "content-range", "tensorferry-")
        kept = [f"{k}: {v}" for k, v in got.getheaders() if k.lower().startswith(told)]
        with self._lock:
            number, self.requests = self.requests, self.requests + 1
        said = answer(f"{got.status} {got.reason}", body, "Connection: close", *kept)
        connection.sendall(self._change(path, number, said))


def flipped(data: bytes, at: int) -> bytes:
    """Returns the bytes with a flipped bit."""
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def unchanged(_path: str, _number: int, said: bytes) -> bytes:
    """An honest relay."""
    return said


def other_digests(path: str, number: int, said: bytes) -> bytes:
    """The digests are different each time they are asked for."""
    return said[:-8] + (number + 1).to_bytes(8, "little") if "/digests" in path else said


def wrong_bytes(path: str, _: int, said: bytes) -> bytes:
    """A bit of each part is another one than the digests say."""
    return flipped(said, len(said) - 1) if ".safetensors" in path else said


def other_snapshots(_: str, number: int, said: bytes) -> bytes:
    """Each answer is of another snapshot."""
    return re.sub(rb'ETag: "', b'ETag: "%d' % number, said, flags=re.IGNORECASE)


def gone(_: str, number: int, said: bytes) -> bytes:
    """After two answers the step is gone."""
    return said if number < 2 else answer("412 Precondition Failed", b"the step went on")


CHANGES: dict[str, Callable[[str, int, bytes], bytes]] = {
    "other digests each time": other_digests,
    "wrong bytes": wrong_bytes,
    "another snapshot each time": other_snapshots,
    "gone after 2 answers": gone,
    **{f"cut after {n} bytes": lambda _path, _number, said, n=n: said[:n] for n in (1, 40, 200)},
}


def state(tree: Any, names: list[str], **fields: Any) -> tuple[bytes, list[str]]:
    """Returns a manifest with this tree, and the names of its tensors."""
    empty = {"version": 1, "flags": "", "objects": 0, "keys": {}, "storages": [], "tensors": [], "shared": []}
    text = json.dumps({**empty, "shards": {}, "globals": {}, "tree": tree, **fields}, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 64), names


def cut_at_dots(parts: int) -> Any:
    """Returns dicts in which one leaf has the same path each time, cut at other dots."""
    return {".".join("a" * n): cut_at_dots(parts - n) if n < parts else 0 for n in range(1, parts + 1)}


def nested(node: Any, depth: int) -> Any:
    """Returns the node in so many lists."""
    for _ in range(depth):
        node = ["l", node]
    return node


#: How many leaves the largest of them have; `--every-verb` takes a million.
many = 50_000

#: What real servers serve: the manifest, and the names of tensors of one byte.
CONTENT: dict[str, Callable[[], tuple[bytes, list[str]]]] = {
    "escapes in names": lambda: state({ESCAPES: 0, f"b{ESCAPES}": ["l", 1]}, [ESCAPES, f"b{ESCAPES}.0"]),
    "many leaves": lambda: state(["l", *range(many)], [str(i) for i in range(many)]),
    "many aliases": lambda: state({"w": 0, "a": ["l", *[0] * many]}, ["w"]),
    "aliases of a long name": lambda: state({"w": 0, "a": ["l", *[0] * many]}, ["w" * MIB]),
    "long paths": lambda: state({"k" * MIB: ["l", *[-1] * many]}, [], objects=1),
    "one path for many": lambda: state(cut_at_dots(14), ["a"]),
    "deeply nested": lambda: state(nested(0, 250), ["w"]),
    "numbers as notes": lambda: state({"w": 0}, ["w"], shared=[[[0], [0]], [[5]], [["x", {}]]], shards={"w": 3}),
    "no manifest": lambda: (b"", [ESCAPES]),
    "nothing": lambda: (b"", []),
}


@contextlib.contextmanager
def serving(manifest: bytes, names: list[str]) -> Iterator[str]:
    """The metadata of a real server over hostile content."""
    byte = ctypes.create_string_buffer(b"x", 64)
    rows = Table()
    for name in names:
        rows.append(byte, name, "U8", (1,), ctypes.addressof(byte), 1, 0)
    control = [(reserved.MANIFEST, manifest), (reserved.PICKLE, b"\x80\x04].")] if manifest else []
    server = Server(patience=5, bind="127.0.0.1", same_host=False)
    try:
        Container(rows, byte, False, control, [("key\x1b[2J", ESCAPES)]).publish(server, 5)
        yield server.url("127.0.0.1")
    finally:
        server.shutdown(1.0)


@contextlib.contextmanager
def answering(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The metadata of a server that answers like this."""
    with Listener(serve) as listener:
        yield listener.metadata


@contextlib.contextmanager
def relaying(metadata: str, change: Callable[[str, int, bytes], bytes]) -> Iterator[str]:
    """The metadata of a relay that changes an honest source's answers."""
    with Relay(metadata, change) as relay:
        yield relay.metadata


@contextlib.contextmanager
def redirecting(metadata: str) -> Iterator[str]:
    """The metadata of a server that sends everybody to an honest source."""
    with answering(constant(answer("302 Found", b"", f"Location: {metadata}5.safetensors"))) as hostile:
        yield hostile


#: By name, what opens a hostile server beside the honest source of this metadata.
SERVERS: dict[str, Callable[[str], contextlib.AbstractContextManager[str]]] = {
    **{name: lambda _, make=make: answering(make()) for name, make in ANSWERS.items()},
    **{name: lambda metadata, change=change: relaying(metadata, change) for name, change in CHANGES.items()},
    **{name: lambda _, make=make: serving(*make()) for name, make in CONTENT.items()},
    "redirects": redirecting,
}
