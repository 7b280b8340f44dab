"""What GCS and Azure answer, as far as their client asks: servers on loopback that keep objects in memory.

No emulator that the registry has speaks the protocol that the client uses with GCS, and none is there for Azure. So
these are made after what the stores' documentation says of requests and answers; they check no signature.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.server
import itertools
import re
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from html import escape, unescape
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bucket"
_ACCOUNT = "account"


class Kept:
    """An object: its bytes, and the number of the write that made it."""

    def __init__(self, data: bytes, number: int) -> None:
        self.data, self.number = data, number
        self.tag = f'"{number:x}"'
        self.when = email.utils.formatdate(usegmt=True)


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)


class _Store(http.server.BaseHTTPRequestHandler):
    """What both have in common: objects, ranges, conditions."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, Kept]
    begun: dict[str, dict[str, bytes]]
    asked: list[tuple[str, str, dict[str, str]]]
    before: list[Callable[[str, str], object]]
    lock: threading.Lock
    numbers: itertools.count[int]
    #: The path before keys.
    root = f"/{BUCKET}"

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.before[0](self.command, self.path)
        with self.lock:
            self.asked.append((self.command, unquote(self.path), headers))
            try:
                key = unquote(url.path).removeprefix(self.root).removeprefix("/")
                status, more, data = self.answer(self.command, key, query, headers, body)
            except _Refused as e:
                status, code = e.args
                more, data = {"x-ms-error-code": code}, f"<Error><Code>{code}</Code></Error>".encode()
        self.send_response_only(status)
        head = self.command == "HEAD"
        for name, value in {"content-length": str(len(data)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815

    def answer(
        self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body."""
        raise NotImplementedError

    def _found(self, key: str, headers: dict[str, str]) -> Kept:
        if (kept := self.objects.get(key)) is None:
            raise _Refused(404, "NoSuchKey")
        if headers.get("if-match", kept.tag) != kept.tag:
            raise _Refused(412, "ConditionNotMet")
        return kept

    def _put(self, key: str, data: bytes) -> Kept:
        self.objects[key] = Kept(data, next(self.numbers))
        return self.objects[key]

    def _got(self, key: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        kept = self._found(key, headers)
        more = {"etag": kept.tag, "last-modified": kept.when, "x-goog-generation": str(kept.number)}
        wanted = headers.get("x-ms-range", headers.get("range"))
        if wanted is None:
            return 200, more, kept.data
        first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups()
        if int(first) >= len(kept.data):
            raise _Refused(416, "InvalidRange")
        data = kept.data[int(first) : int(last) + 1]
        more["content-range"] = f"bytes {first}-{int(first) + len(data) - 1}/{len(kept.data)}"
        return 206, more, data

    def _listed(self, query: dict[str, str], after: str) -> tuple[list[tuple[str, Kept]], list[str], str | None]:
        """Returns two objects or fewer, their folders, and behind which key the next answer begins."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        here, rest = keys[:2], keys[2:]
        inside = {key: key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "") for key in here}
        folders = sorted({prefix + name + delimiter for name, cut, _ in inside.values() if cut})
        found = [(key, self.objects[key]) for key, (_, cut, _) in inside.items() if not cut]
        return found, folders, here[-1] if rest else None

    def log_message(self, *_: object) -> None:
        pass


class Gcs(_Store):
    """The XML API of GCS."""

    def answer(self, method, key, query, headers, body):
        if method == "GET" and not key:
            found, folders, token = self._listed(query, query.get("continuation-token", query.get("start-after", "")))
            text = "".join(
                f"<Contents><Key>{escape(name)}</Key><LastModified>2026-11-26T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(kept.tag)}</ETag><Size>{len(kept.data)}</Size></Contents>"
                for name, kept in found
            )
            text += "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders)
            text += f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else ""
            return 200, {}, f"<ListBucketResult>{text}</ListBucketResult>".encode()
        if method in ("GET", "HEAD"):
            return self._got(key, headers)
        if method == "POST" and "uploads" in query:
            name = f"upload{next(self.numbers)}"
            self.begun[name] = {}
            about = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
            return 200, {}, f"<InitiateMultipartUploadResult>{about}</InitiateMultipartUploadResult>".encode()
        if method == "PUT" and "uploadId" in query:
            self.begun[query["uploadId"]][query["partNumber"]] = body
            return 200, {"etag": f'"part{query["partNumber"]}"'}, b""
        if method == "POST" and "uploadId" in query:
            parts = self.begun.pop(query["uploadId"])
            numbers = re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())
            kept = self._put(key, b"".join(parts[number] for number in numbers))
            text = f"<ETag>{escape(kept.tag)}</ETag>"
            return (
                200,
                {"x-goog-generation": str(kept.number)},
                f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>".encode(),
            )
        if method == "DELETE" and "uploadId" in query:
            self.begun.pop(query["uploadId"], None)
            return 204, {}, b""
        if method == "DELETE":
            self._found(key, {})
            del self.objects[key]
            return 204, {}, b""
        there = self.objects[key].number if key in self.objects else 0
        if headers.get("x-goog-if-generation-match", str(there)) != str(there):
            raise _Refused(412, "PreconditionFailed")
        kept = self._put(key, body)
        return 200, {"etag": kept.tag, "x-goog-generation": str(kept.number)}, b""


class Azure(_Store):
    """Block blobs of Azure, of one container."""

    root = f"/{_ACCOUNT}/{BUCKET}"

    def answer(self, method, key, query, headers, body):
        if method == "GET" and query.get("comp") == "list":
            found, folders, marker = self._listed(query, query.get("marker", ""))
            text = "".join(
                f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{kept.when}</Last-Modified>"
                f"<Content-Length>{len(kept.data)}</Content-Length><Content-Type>application/octet-stream</Content-Type>"
                f"<Etag>{escape(kept.tag)}</Etag></Properties></Blob>"
                for name, kept in found
            )
            text += "".join(f"<BlobPrefix><Name>{escape(one)}</Name></BlobPrefix>" for one in folders)
            end = f"<NextMarker>{escape(marker or '')}</NextMarker>"
            return 200, {}, f"<EnumerationResults><Blobs>{text}</Blobs>{end}</EnumerationResults>".encode()
        if method == "POST" and query.get("comp") == "batch":
            return self._batch(body.decode())
        if method in ("GET", "HEAD"):
            return self._got(key, headers)
        if method == "DELETE":
            self._found(key, {})
            del self.objects[key]
            return 202, {}, b""
        if query.get("comp") == "block":
            self.begun.setdefault(key, {})[query["blockid"]] = body
            return 201, {}, b""
        # As the documentation says: 409 where an object is that was not expected, 412 where another one is.
        if headers.get("if-none-match") == "*" and key in self.objects:
            raise _Refused(409, "BlobAlreadyExists")
        if "if-match" in headers:
            self._found(key, headers)
        if query.get("comp") == "blocklist":
            blocks = self.begun.pop(key, {})
            body = b"".join(
                blocks[unescape(one)] for one in re.findall(r"<(?:Latest|Uncommitted)>([^<]+)<", body.decode())
            )
        kept = self._put(key, body)
        return 201, {"etag": kept.tag, "last-modified": kept.when}, b""

    def _batch(self, body: str) -> tuple[int, dict[str, str], bytes]:
        lines = []
        for number, path in re.findall(r"Content-ID: (\d+).*?DELETE (\S+) HTTP", body, re.DOTALL):
            name = unquote(urlsplit(path).path)
            key = name.removeprefix(f"/{_ACCOUNT}").removeprefix(f"/{BUCKET}").removeprefix("/")
            status = "202 Accepted" if self.objects.pop(key, None) else "404 Not Found"
            lines.append(
                f"--x\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\n"
                "Content-Length: 0\r\n\r\n\r\n"
            )
        return 202, {"content-type": "multipart/mixed; boundary=x"}, ("".join(lines) + "--x--\r\n").encode()


class Other:
    """A server that runs.

    Attributes:
        place: the URL of a place in its bucket
        objects: by key
        begun: the uploads that were begun and not ended, or blocks that no list has taken
        asked: method, path and headers of each request
    """

    def __init__(self, place: str, handler: type[_Store]) -> None:
        self.place = place
        self.objects, self.begun, self.asked = handler.objects, handler.begun, handler.asked
        self._before = handler.before

    def call_before(self, look: Callable[[str, str], object]) -> None:
        """Has ``look`` called with method and path of each request, before it is answered."""
        self._before[0] = look


@contextlib.contextmanager
def other_store(kind: str) -> Iterator[tuple[Other, dict[str, str]]]:
    """Yields a server of ``gcs`` or ``azure``, and the variables by which clients find it."""

    class Handler(Gcs if kind == "gcs" else Azure):
        objects, begun, asked, before = {}, {}, [], [lambda *_: None]
        lock, numbers = threading.Lock(), itertools.count(1)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        if kind == "gcs":
            variables = {"GOOGLE_BASE_URL": url, "GOOGLE_BEARER_TOKEN": "token"}
        else:
            variables = {
                "AZURE_STORAGE_ENDPOINT": f"{url}/{_ACCOUNT}",
                "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": b64encode(b"key").decode(),
            }
        scheme = "gs" if kind == "gcs" else "az"
        try:
            yield Other(f"{scheme}://{BUCKET}/run", Handler), variables
        finally:
            server.shutdown()
