"""The program of a server that keeps objects in memory, for benches/objects.py: the part of S3 that its clients use.

It checks no signature and no checksum, and copies no byte: bodies are received into memory that lies there already,
and sent from it. What it has moved is told at /-/figures. Its arguments are an address, how many MiB of memory it shall
have touched before it begins, and a port.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import socket
import sys
import threading
from collections import Counter
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

#: The port, unless another one is given; 0 takes any.
PORT = 29500
MIB = 1 << 20
#: Options of the C library's memory, and what they are set to: memory that is freed stays, and is used again.
_STAYS = {-1: -1, -3: 32 << 20, -8: 1}
_PIECE = 8 * MIB
_WHEN = "Wed, 25 Nov 2026 16:00:00 GMT", "2026-11-25T16:00:00.000Z"
_HTTP = {200: "OK", 204: "No Content", 206: "Partial Content", 304: "Not Modified", 404: "Not Found"} | {
    412: "Precondition Failed",
    416: "Range Not Satisfiable",
}

Parts = list[memoryview]


class Store:
    """The objects of all buckets, and what was moved."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[str, Parts]] = {}
        self.uploads: dict[str, tuple[str, dict[int, Parts]]] = {}
        self.figures: Counter[str] = Counter()
        self._tags = 0

    def tag(self) -> str:
        """Returns a new tag."""
        self._tags += 1
        return f'"{self._tags:032x}"'


class Connection:
    """One connection of a client: its requests, one after the other."""

    def __init__(self, store: Store, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._store, self._peer = store, peer
        self._rest = b""
        self._headers: dict[str, str] = {}

    def serve(self) -> None:
        """Answers until the client goes."""
        with contextlib.suppress(OSError), self._peer:
            while self._request():
                pass

    def _request(self) -> bool:
        while b"\r\n\r\n" not in self._rest:
            if not (got := self._peer.recv(64 << 10)):
                return False
            self._rest += got
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        self._headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if self._headers.get("expect", "").lower() == "100-continue":
            self._peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._body(int(self._headers.get("content-length") or 0))
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        with self._store.lock:
            self._store.figures.update({"requests": 1, "received": sum(map(len, body))})
        getattr(self, f"_{method.lower()}")(unquote(url.path), query, body)
        return True

    def _body(self, nbytes: int) -> Parts:
        """Receives a body; what comes in chunks with signatures or checksums loses these."""
        whole = memoryview(bytearray(nbytes))
        done = min(len(self._rest), nbytes)
        whole[:done], self._rest = self._rest[:done], self._rest[done:]
        while done < nbytes:
            if not (got := self._peer.recv_into(whole[done:], 0, socket.MSG_WAITALL)):
                raise ConnectionError
            done += got
        if "x-amz-decoded-content-length" not in self._headers:
            return [whole]
        parts, at = [], 0
        while True:
            line, _, _ = bytes(whole[at : at + 256]).partition(b"\r\n")
            size, at = int(line.partition(b";")[0], 16), at + len(line) + 2
            if not size:
                return parts
            parts.append(whole[at : at + size])
            at += size + 2

    def _answer(self, status: int, body: Parts | bytes = b"", length: int | None = None, **headers: str) -> None:
        parts = [memoryview(body)] if isinstance(body, bytes) else body
        length = sum(map(len, parts)) if length is None else length
        lines = [f"HTTP/1.1 {status} {_HTTP[status]}", f"Content-Length: {length}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        with self._store.lock:
            self._store.figures["sent"] += sum(map(len, parts))
        self._peer.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        for part in parts:
            self._peer.sendall(part)

    def _get(self, path: str, query: dict[str, str], _body: Parts, with_body: bool = True) -> None:
        if path == "/-/figures":
            figures = json.dumps(self._store.figures).encode()
            self._answer(200, figures)
            with self._store.lock:
                self._store.figures["sent"] -= len(figures)
            return
        if path.count("/") == 1 or not path.partition("/")[2].partition("/")[2]:
            self._answer(200, self._listing(path.strip("/"), query) if with_body else b"")
            return
        with self._store.lock:
            found = self._store.objects.get(path)
        if found is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>" if with_body else b"")
            return
        tag, parts = found
        size = sum(map(len, parts))
        start, stop, status, more = 0, size, 200, {}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self._headers.get("range", "")):
            start, stop, status = int(asked[1]), min(size, int(asked[2] or size) + 1), 206
            more["Content_Range"] = f"bytes {start}-{stop - 1}/{size}"
        if self._headers.get("if-match", tag) not in (tag, "*"):
            self._answer(412)
        elif start >= size and status == 206:
            self._answer(416)
        else:
            sent = _cut(parts, start, stop) if with_body else []
            self._answer(status, sent, stop - start, ETag=tag, Last_Modified=_WHEN[0], Accept_Ranges="bytes", **more)

    def _head(self, path: str, query: dict[str, str], body: Parts) -> None:
        self._get(path, query, body, with_body=False)

    def _listing(self, bucket: str, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        lines, below, start = [], set(), f"/{bucket}/{prefix}"
        with self._store.lock:
            found = sorted((path, parts) for path, parts in self._store.objects.items() if path.startswith(start))
        for path, (tag, parts) in found if "uploads" not in query else []:
            key = path[len(bucket) + 2 :]
            if delimiter and delimiter in key[len(prefix) :]:
                below.add(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
            else:
                size = sum(map(len, parts))
                lines.append(
                    f"<Contents><Key>{key}</Key><LastModified>{_WHEN[1]}</LastModified><ETag>{tag}</ETag>"
                    f"<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
                )
        lines += [f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in sorted(below)]
        kind = "ListMultipartUploadsResult" if "uploads" in query else "ListBucketResult"
        about = (
            f"<Name>{bucket}</Name><Prefix>{prefix}</Prefix><KeyCount>{len(lines)}</KeyCount><MaxKeys>1000000</MaxKeys>"
        )
        return f"<{kind}>{about}<IsTruncated>false</IsTruncated>{''.join(lines)}</{kind}>".encode()

    def _put(self, path: str, query: dict[str, str], body: Parts) -> None:
        with self._store.lock:
            tag, there = self._store.tag(), self._store.objects.get(path)
            if source := self._headers.get("x-amz-copy-source"):
                body = self._store.objects["/" + unquote(source).lstrip("/")][1]
            refused = self._headers.get("if-none-match") == "*" and there is not None
            if (expected := self._headers.get("if-match")) is not None:
                refused = refused or there is None or there[0] != expected
            if "uploadId" in query:
                self._store.uploads[query["uploadId"]][1][int(query["partNumber"])] = body
            elif not refused and path.strip("/").count("/"):
                self._store.objects[path] = tag, body
        if refused:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            copied = f"<CopyObjectResult><LastModified>{_WHEN[1]}</LastModified><ETag>{tag}</ETag></CopyObjectResult>"
            self._answer(200, copied.encode() if source else b"", ETag=tag)

    def _post(self, path: str, query: dict[str, str], body: Parts) -> None:
        bucket, _, key = path.strip("/").partition("/")
        named = f"<Bucket>{bucket}</Bucket><Key>{key}</Key>"
        with self._store.lock:
            tag = self._store.tag()
            if "delete" in query:
                keys = re.findall(r"<Key>([^<]*)</Key>", b"".join(body).decode())
                for name in keys:
                    self._store.objects.pop(f"/{bucket}/{name}", None)
                text = (
                    f"<DeleteResult>{''.join(f'<Deleted><Key>{name}</Key></Deleted>' for name in keys)}</DeleteResult>"
                )
            elif "uploads" in query:
                upload = tag.strip('"')
                self._store.uploads[upload] = path, {}
                kind = "InitiateMultipartUploadResult"
                text = f"<{kind}>{named}<UploadId>{upload}</UploadId></{kind}>"
            else:
                _, parts = self._store.uploads.pop(query["uploadId"])
                self._store.objects[path] = tag, [one for number in sorted(parts) for one in parts[number]]
                kind = "CompleteMultipartUploadResult"
                text = f"<{kind}>{named}<Location>{path}</Location><ETag>{tag}</ETag></{kind}>"
        self._answer(200, text.encode())

    def _delete(self, path: str, query: dict[str, str], _body: Parts) -> None:
        with self._store.lock:
            if "uploadId" in query:
                self._store.uploads.pop(query["uploadId"], None)
            else:
                self._store.objects.pop(path, None)
        self._answer(204)


def _cut(parts: Parts, start: int, stop: int) -> Parts:
    """Returns bytes `start` to `stop` of an object."""
    found, at = [], 0
    for part in parts:
        low, high = max(start - at, 0), min(stop - at, len(part))
        if low < high:
            found.append(part[low:high])
        at += len(part)
    return found


def main(address: str, mib: int, port: int = PORT) -> None:
    """Serves until it is killed; says its URL in a line of JSON."""
    library: Any = ctypes.CDLL(None)
    for option, value in _STAYS.items():
        library.mallopt(option, value)
    touched = [bytearray(b"-") * _PIECE for _ in range(mib * MIB // _PIECE)]
    del touched
    store = Store()
    with socket.create_server((address, port), backlog=256) as listening:
        print(json.dumps({"url": f"http://{address}:{listening.getsockname()[1]}"}), flush=True)
        while True:
            peer, _ = listening.accept()
            threading.Thread(target=Connection(store, peer).serve, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:4]))
