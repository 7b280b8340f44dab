"""What GCS and Azure answer, as far as their client asks: servers on loopback that keep objects in memory.

No emulator that the registry has speaks the protocol that the client uses with GCS, and none is there for Azure. So
these are made after what the stores' documentation says of requests and answers; they check no signature.
"""

from __future__ import annotations

import email.utils
import itertools
import re
import threading
from base64 import b64encode
from html import escape
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from stores import BUCKET, Gateway

_ACCOUNT = "account"


def refused(status: int, code: str) -> tuple[int, bytes, dict[str, str]]:
    return status, f"<Error><Code>{code}</Code></Error>".encode(), {"x-ms-error-code": code}


class OtherStore(Gateway):
    """What both have in common: objects, ranges, conditions.

    Attributes:
        place: the URL of a place in its bucket
        objects: by key, the bytes and the number of the write that made them
        asked: method, path and headers of each request
        before: called with method and path of each request, before it is answered
    """

    place: str
    #: What stands in the path before keys.
    root = f"/{BUCKET}"

    def __init__(self) -> None:
        super().__init__("")
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.before: Any = lambda *_: None
        self.one_at_a_time, self.numbers = threading.Lock(), itertools.count(1)

    def decide(self, number: int, method: str, path: str, body: bytes) -> Any:
        url = urlsplit(path)
        query, key = dict(parse_qsl(url.query, keep_blank_values=True)), unquote(url.path).removeprefix(self.root)[1:]
        self.before(method, path)
        with self.one_at_a_time:
            self.asked.append((method, unquote(path), self.headers[number]))
            return self.answer(method, key, query, self.headers[number], body)

    def about(self, key: str) -> dict[str, str]:
        number = self.objects[key][1]
        return {
            "etag": f'"{number:x}"',
            "last-modified": email.utils.formatdate(usegmt=True),
            "x-goog-generation": str(number),
        }

    def put(self, key: str, data: bytes) -> dict[str, str]:
        self.objects[key] = data, next(self.numbers)
        return self.about(key)

    def got(self, key: str, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        if key not in self.objects:
            return refused(404, "NoSuchKey")
        data, about = self.objects[key][0], self.about(key)
        if headers.get("if-match", about["etag"]) != about["etag"]:
            return refused(412, "ConditionNotMet")
        if (wanted := headers.get("x-ms-range", headers.get("range"))) is None:
            return 200, data, about
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups())
        part = data[first : last + 1]
        return 206, part, {**about, "content-range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"}

    def listed(self, query: dict[str, str], of_object: str, of_folder: str) -> str:
        """Returns objects and folders in the given formats."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found = {}
        for key in sorted(self.objects):
            if key.startswith(prefix) and key > query.get("start-after", ""):
                name, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                about = {"key": escape(key), "nbytes": len(self.objects[key][0]), **self.about(key)}
                folder = escape(prefix + name + delimiter)
                found[folder if cut else key] = of_folder.format(folder) if cut else of_object.format(**about)
        return "".join(found.values())


class Gcs(OtherStore):
    """The XML API of GCS."""

    place = f"gs://{BUCKET}/run"
    OBJECT = (
        "<Contents><Key>{key}</Key><LastModified>2026-11-26T00:00:00.000Z</LastModified><ETag>{etag}</ETag>"
        "<Size>{nbytes}</Size></Contents>"
    )

    @property
    def variables(self) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": self.url, "GOOGLE_BEARER_TOKEN": "token"}

    def answer(self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Any:
        if method == "GET" and not key:
            found = self.listed(query, self.OBJECT, "<CommonPrefixes><Prefix>{}</Prefix></CommonPrefixes>")
            return 200, f"<ListBucketResult>{found}</ListBucketResult>".encode()
        if method in ("GET", "HEAD"):
            return self.got(key, headers)
        there = str(self.objects.get(key, (b"", 0))[1])
        if method == "DELETE":
            return (204, b"") if self.objects.pop(key, None) else refused(404, "NoSuchKey")
        if headers.get("x-goog-if-generation-match", there) != there:
            return refused(412, "PreconditionFailed")
        return 200, b"", self.put(key, body)


class Azure(OtherStore):
    """Block blobs of Azure, of one container."""

    place = f"az://{BUCKET}/run"
    root = f"/{_ACCOUNT}/{BUCKET}"
    OBJECT = (
        "<Blob><Name>{key}</Name><Properties><Last-Modified>{last-modified}</Last-Modified>"
        "<Content-Length>{nbytes}</Content-Length><Content-Type>application/octet-stream</Content-Type>"
        "<Etag>{etag}</Etag></Properties></Blob>"
    )

    @property
    def variables(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": f"{self.url}/{_ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": b64encode(b"key").decode(),
        }

    def answer(self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Any:
        if method == "GET" and query.get("comp") == "list":
            found = self.listed(query, self.OBJECT, "<BlobPrefix><Name>{}</Name></BlobPrefix>")
            return 200, f"<EnumerationResults><Blobs>{found}</Blobs><NextMarker/></EnumerationResults>".encode()
        if method == "POST" and query.get("comp") == "batch":
            return self._batch(body.decode())
        if method in ("GET", "HEAD"):
            return self.got(key, headers)
        if method == "DELETE":
            return (202, b"") if self.objects.pop(key, None) else refused(404, "NoSuchKey")
        # As the documentation says: 409 where an object is that was not expected, 412 where another one is.
        if headers.get("if-none-match") == "*" and key in self.objects:
            return refused(409, "BlobAlreadyExists")
        if "if-match" in headers and (key not in self.objects or headers["if-match"] != self.about(key)["etag"]):
            return refused(412, "ConditionNotMet")
        return 201, b"", self.put(key, body)

    def _batch(self, body: str) -> tuple[int, bytes, dict[str, str]]:
        lines = []
        for number, path in re.findall(r"Content-ID: (\d+).*?DELETE (\S+) HTTP", body, re.DOTALL):
            key = unquote(urlsplit(path).path).removeprefix(f"/{_ACCOUNT}").removeprefix(f"/{BUCKET}/")
            status = "202 Accepted" if self.objects.pop(key, None) else "404 Not Found"
            lines.append(
                f"--x\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\n"
                "Content-Length: 0\r\n\r\n\r\n"
            )
        return 202, ("".join(lines) + "--x--\r\n").encode(), {"content-type": "multipart/mixed; boundary=x"}
