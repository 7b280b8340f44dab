"""What any HTTP client gets: ranges, conditions, resources, and errors."""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import torch

from equality import assert_same_state
from exchange import TIMEOUT, connect, path, receive
from tensorferry import WrongStep
from tensorferry._native import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(90)

#: What a peer with another ``num_chunks`` is told, in words that are also what its log shows.
OTHER_CHUNKS = "The transport that serves this step has another num_chunks than the one that asks: give both the same"


class Site:
    """One connection to one transport, kept alive over all requests."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.connection = connect(transport)

    def __call__(
        self, method: str, resource: str, headers: dict[str, str] | None = None, *, absolute: bool = False
    ) -> tuple[http.client.HTTPResponse, bytes]:
        self.connection.request(method, resource if absolute else path(self.transport, resource), headers=headers or {})
        response = self.connection.getresponse()
        return response, response.read()


@pytest.fixture
def site(open_transport: Callable[..., Any]) -> Iterator[Site]:
    transport = open_transport()
    transport.send_checkpoint([1], 1, {"w": torch.arange(1000.0), "o": {1, 2}}, TIMEOUT)
    made = Site(transport)
    with contextlib.closing(made.connection):
        yield made


@pytest.mark.beyond_torchft
class TestHTTP:
    RESOURCE = "1.safetensors"

    def test_get_and_head(self, site: Site) -> None:
        response, body = site("GET", self.RESOURCE)
        assert response.status == 200
        assert response.version == 11
        assert int(response.headers["Content-Length"]) == len(body) > 4000
        assert response.headers["Accept-Ranges"] == "bytes"
        assert re.fullmatch(r'"[^"]+"', response.headers["ETag"]), "a strong validator"
        assert response.headers["Content-Type"]
        head, nothing = site("HEAD", self.RESOURCE)
        assert (head.status, nothing) == (200, b"")
        for name in ("Content-Length", "Accept-Ranges", "ETag", "Content-Type"):
            assert head.headers[name] == response.headers[name]

    @pytest.mark.parametrize(
        ("spec", "first", "last"),
        [
            ("0-0", 0, 0),
            ("0-7", 0, 7),
            ("8-99", 8, 99),
            ("100-", 100, -1),
            ("-16", -16, -1),
            ("-1", -1, -1),
            ("-99999999", 0, -1),
            ("10-99999999", 10, -1),
            ("0-", 0, -1),
        ],
    )
    def test_range(self, site: Site, spec: str, first: int, last: int) -> None:
        _, whole = site("GET", self.RESOURCE)
        size = len(whole)
        first, last = first % size, last % size
        response, body = site("GET", self.RESOURCE, {"Range": f"bytes={spec}"})
        assert response.status == 206
        assert response.headers["Content-Range"] == f"bytes {first}-{last}/{size}"
        assert int(response.headers["Content-Length"]) == last - first + 1
        assert body == whole[first : last + 1]

    def test_every_byte_by_itself(self, site: Site) -> None:
        _, whole = site("GET", self.RESOURCE)
        for start in range(0, len(whole), 7):
            response, body = site("GET", self.RESOURCE, {"Range": f"bytes={start}-{start + 6}"})
            assert response.status == 206
            assert body == whole[start : start + 7]

    @pytest.mark.parametrize("spec", ["{size}-", "{size}-{size}", "99999999-999999999", "-0"])
    def test_range_not_satisfiable(self, site: Site, spec: str) -> None:
        size = len(site("GET", self.RESOURCE)[1])
        response, _ = site("GET", self.RESOURCE, {"Range": f"bytes={spec.format(size=size)}"})
        assert response.status == 416
        assert response.headers["Content-Range"] == f"bytes */{size}"

    @pytest.mark.parametrize("value", ["lines=0-1", "bytes", "bytes=", "bytes=a-b", "bytes=--1", "5-6"])
    def test_range_that_is_none_is_ignored_or_rejected(self, site: Site, value: str) -> None:
        _, whole = site("GET", self.RESOURCE)
        response, body = site("GET", self.RESOURCE, {"Range": value})
        assert response.status in (200, 400, 416)
        assert response.status != 200 or body == whole

    @pytest.mark.parametrize("value", ["bytes=7-5", "bytes=0-18446744073709551616", "bytes=18446744073709551616-"])
    def test_range_of_odd_numbers(self, site: Site, value: str) -> None:
        assert site("GET", self.RESOURCE, {"Range": value})[0].status in (200, 206, 400, 416)

    def test_several_ranges(self, site: Site) -> None:
        _, whole = site("GET", self.RESOURCE)
        response, body = site("GET", self.RESOURCE, {"Range": "bytes=0-1,4-5"})
        assert response.status in (200, 206)
        assert response.status != 200 or body == whole
        assert response.status != 206 or response.headers["Content-Type"].startswith("multipart/byteranges")

    def test_range_of_a_head_request_is_ignored(self, site: Site) -> None:
        """RFC 9110, section 14.2, defines Range for GET only."""
        whole = site("HEAD", self.RESOURCE)[0]
        response, _ = site("HEAD", self.RESOURCE, {"Range": "bytes=0-7"})
        assert response.status == 200
        assert response.headers["Content-Length"] == whole.headers["Content-Length"]

    def test_if_match(self, site: Site) -> None:
        tag = site("HEAD", self.RESOURCE)[0].headers["ETag"]
        for good in (tag, "*", f'"other", {tag}'):
            assert site("GET", self.RESOURCE, {"If-Match": good})[0].status == 200
            assert site("GET", self.RESOURCE, {"If-Match": good, "Range": "bytes=0-3"})[0].status == 206
        for bad in ('"other"', f"W/{tag}", '"a", "b"'):
            response, body = site("GET", self.RESOURCE, {"If-Match": bad})
            assert response.status == 412
            assert len(body) < 1000
            assert site("GET", self.RESOURCE, {"If-Match": bad, "Range": "bytes=0-3"})[0].status == 412
            assert site("HEAD", self.RESOURCE, {"If-Match": bad})[0].status == 412

    def test_if_none_match(self, site: Site) -> None:
        tag = site("HEAD", self.RESOURCE)[0].headers["ETag"]
        for known in (tag, "*", f'"other", {tag}', f"W/{tag}"):
            response, body = site("GET", self.RESOURCE, {"If-None-Match": known})
            assert (response.status, body) == (304, b"")
            assert response.headers["ETag"] == tag
            assert site("HEAD", self.RESOURCE, {"If-None-Match": known})[0].status == 304
        assert site("GET", self.RESOURCE, {"If-None-Match": '"other"'})[0].status == 200
        both = {"If-Match": '"other"', "If-None-Match": tag}
        assert site("GET", self.RESOURCE, both)[0].status == 412, "If-Match comes first"

    def test_if_range(self, site: Site) -> None:
        tag = site("HEAD", self.RESOURCE)[0].headers["ETag"]
        assert site("GET", self.RESOURCE, {"If-Range": tag, "Range": "bytes=0-3"})[0].status == 206
        for stale in ('"other"', f"W/{tag}", "Sat, 21 Nov 2026 08:00:00 GMT"):
            response, body = site("GET", self.RESOURCE, {"If-Range": stale, "Range": "bytes=0-3"})
            assert response.status == 200
            assert len(body) == int(response.headers["Content-Length"]) > 4000

    def test_etag_names_the_snapshot(self, site: Site, open_transport: Callable[..., Any]) -> None:
        other = open_transport()
        other.send_checkpoint([1], 1, {"w": torch.arange(1000.0), "o": {1, 2}}, TIMEOUT)
        tags = []
        for transport in (site.transport, site.transport, site.transport, other):
            transport.send_checkpoint([1], 1, {"w": torch.arange(1000.0), "o": {1, 2}}, TIMEOUT)
            with contextlib.closing(connect(transport)) as connection:
                connection.request("HEAD", path(transport, self.RESOURCE))
                response = connection.getresponse()
                response.read()
                tags.append(response.headers["ETag"])
        assert len(set(tags)) == 4

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
    def test_method_not_allowed(self, site: Site, method: str) -> None:
        response, _ = site(method, self.RESOURCE)
        assert response.status == 405
        assert {"GET", "HEAD"} <= {name.strip() for name in response.headers["Allow"].split(",")}

    def test_header_resource(self, site: Site) -> None:
        _, whole = site("GET", self.RESOURCE)
        response, header = site("GET", "1/header")
        assert response.status == 200
        assert int(response.headers["Content-Length"]) == len(header)
        size = 8 + int.from_bytes(whole[:8], "little")
        assert whole[:size].endswith(header)
        assert len(header) in (size, size - 8)
        assert site("HEAD", "1/header")[0].headers["Content-Length"] == str(len(header))

    def test_digests_resource(self, site: Site) -> None:
        response, digests = site("GET", "1/digests")
        assert response.status == 200
        assert int(response.headers["Content-Length"]) == len(digests) > 0
        assert site("HEAD", "1/digests")[0].headers["Content-Length"] == str(len(digests))

    @pytest.mark.parametrize("resource", ["2.safetensors", "2/header", "2/digests", "2/full", "2/metadata", "2/0"])
    @pytest.mark.waits
    def test_wrong_step(self, site: Site, resource: str) -> None:
        response, _ = site("GET", resource)
        assert response.status == 400
        assert response.reason == "invalid checkpoint requested, serving 1 but got step=2"

    @pytest.mark.parametrize(
        "resource",
        [
            "1", "1/", "1/nothing", "x.safetensors", "x/full", "1/full/more", "1/-1", "1/99", "1.safetensors/",
            "99999999999999999999999.safetensors", "-1.safetensors", "1/..%2f..%2f", "%00", "1.safetensors%00", "../",
        ],
    )  # fmt: skip
    def test_no_such_resource(self, site: Site, resource: str) -> None:
        assert 400 <= site("GET", resource)[0].status < 500
        assert 400 <= site("HEAD", resource)[0].status < 500

    @pytest.mark.parametrize(
        "name",
        [
            "FULL", "full/1", "full/", "1x", "1_0", "%201", "-", "99999999999999999999", "../2/full", "header/0",
            "dcp/a/b", "dcp/.metadata/", "DCP/.metadata",
        ],
    )  # fmt: skip
    def test_no_such_format(self, site: Site, name: str) -> None:
        response, _ = site("GET", f"1/{name}")
        assert response.status == 400
        assert response.reason == f"invalid url format, expected /checkpoint/step/key but got /checkpoint/1/{name}"

    def test_formats_are_refused_in_their_own_words(self, site: Site) -> None:
        for name, words in (
            ("99", f"list index out of range: there is no chunk 99. {OTHER_CHUNKS}"),
            ("dcp/x", "there is no file x here"),
        ):
            response, _ = site("GET", f"1/{name}")
            assert (response.status, response.reason) == (404, words)
        assert site("GET", "1/+000")[1] == site("GET", "1/0")[1], "an index as int() reads it"

    def test_a_step_without_a_state_is_404(self) -> None:
        server = Server(patience=TIMEOUT.total_seconds(), bind="127.0.0.1")
        server.allow(10)
        with pytest.raises(urllib.error.HTTPError, match="no state was sent: call send_checkpoint first") as refused:
            urllib.request.urlopen(server.url("127.0.0.1") + "10.safetensors")
        assert refused.value.code == 404
        refused.value.close()
        server.shutdown(TIMEOUT.total_seconds())

    def test_a_shutdown_may_be_given_any_time(self) -> None:
        for patience in (0.0, 1e19):
            server = Server(patience=TIMEOUT.total_seconds(), bind="127.0.0.1")
            server.shutdown(patience)

    @pytest.mark.parametrize("method", ["GET", "HEAD"])
    def test_without_the_random_part_all_is_404(self, site: Site, method: str) -> None:
        token = path(site.transport, "").split("/")[1]
        wrong = [token[:-1], token.upper() + "0", "0" * 32, token[1:] + token[0], f"{token}0", "", f"./{token}x"]
        paths = [
            "/",
            "/checkpoint/1/full",
            "/checkpoint/1.safetensors",
            "/metrics",
            "/checkpoint/",
            "/favicon.ico",
            "*",
        ]
        paths += [f"/{one}/checkpoint/1.safetensors" for one in wrong] + [f"/{one}/metrics" for one in wrong]
        for one in paths:
            assert site(method, one, absolute=True)[0].status == 404, one
        site.transport.disallow_checkpoint()
        for one in paths:
            assert site(method, one, absolute=True)[0].status == 404, one

    def test_health_and_metrics(self, site: Site) -> None:
        assert site("GET", "/healthz", absolute=True)[0].status == 200
        token = path(site.transport, "").split("/")[1]
        response, body = site("GET", f"/{token}/metrics", absolute=True)
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain")
        assert re.search(rb"(?m)^# TYPE tensorferry_\w+ (counter|gauge|histogram)$", body)
        site.transport.disallow_checkpoint()
        assert site("GET", "/healthz", absolute=True)[0].status == 200
        assert site("GET", f"/{token}/metrics", absolute=True)[0].status == 200

    @pytest.mark.waits
    def test_metrics_of_a_receiver(self, site: Site, open_transport: Callable[..., Any]) -> None:
        """A scraper gets the numbers that the log line has."""
        receiver = open_transport(num_chunks=2, same_host=False)
        counters = receiver.metadata().replace("/checkpoint/", "/metrics")

        def scrape() -> str:
            with urllib.request.urlopen(counters) as answer:
                return str(answer.read().decode())

        assert 'tensorferry_receives_total{end="healed"} 0' in scrape()
        receiver.recv_checkpoint(0, site.transport.metadata(), 1, TIMEOUT)
        with pytest.raises(WrongStep):
            receiver.recv_checkpoint(0, site.transport.metadata(), 2, TIMEOUT)
        found = scrape()
        assert 'tensorferry_receives_total{end="healed"} 1' in found
        assert 'tensorferry_receives_total{end="failed"} 1' in found
        (received,) = re.findall(r"(?m)^tensorferry_received_bytes_total (\d+)$", found)
        assert int(received) > 0
        for phase in ("open", "fetch", "build"):
            (seconds,) = re.findall(rf'(?m)^tensorferry_last_receive_seconds{{phase="{phase}"}} (\S+)$', found)
            assert float(seconds) > 0

    def test_http_1_0(self, site: Site) -> None:
        with socket.create_connection(("127.0.0.1", site.connection.port), timeout=30) as old:
            old.sendall(f"GET {path(site.transport, self.RESOURCE)} HTTP/1.0\r\n\r\n".encode())
            answer = b"".join(iter(lambda: old.recv(1 << 16), b""))
        assert re.match(rb"HTTP/1\.[01] 200 ", answer)
        assert answer.partition(b"\r\n\r\n")[2] == site("GET", self.RESOURCE)[1]

    @pytest.mark.parametrize(
        "request_bytes",
        [
            b"nonsense\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        ],
        ids=["nonsense", "version", "tls", "long path", "many headers"],
    )
    def test_a_bad_request_does_no_harm(self, site: Site, request_bytes: bytes) -> None:
        bad = socket.create_connection(("127.0.0.1", site.connection.port), timeout=10)
        with bad, contextlib.suppress(OSError):  # it may hang up before it has read all of it
            bad.sendall(request_bytes)
            bad.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: bad.recv(1 << 16), b""))
            assert not answer or re.match(rb"HTTP/1\.[01] [45]\d\d ", answer)
        assert_same_state(receive(site.transport, site.transport, 1), {"w": torch.arange(1000.0), "o": {1, 2}})

    def test_both_address_families(self, site: Site) -> None:
        for host in ("127.0.0.1", "::1"):
            try:
                connection = socket.create_connection((host, site.connection.port), timeout=10)
            except OSError as error:
                if host == "::1":
                    pytest.skip(f"no IPv6 here: {error}")
                raise
            connection.close()


@pytest.mark.beyond_torchft
@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
class TestCurl:
    @staticmethod
    def curl(*arguments: str) -> bytes:
        # A proxy in the environment must not take part in this test.
        return subprocess.run(
            ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "30", *arguments],
            check=True,
            capture_output=True,
            timeout=60,
        ).stdout

    @pytest.mark.process
    def test_fetch_head_and_range(self, site: Site) -> None:
        url = f"{site.transport.metadata()}1.safetensors"
        whole = site("GET", "1.safetensors")[1]
        assert self.curl("--fail", url) == whole
        assert self.curl("--range", "8-15", url) == whole[8:16]
        assert self.curl("--range", "-4", url) == whole[-4:]
        head = self.curl("--head", url).decode().lower()
        assert head.startswith("http/1.1 200")
        assert f"content-length: {len(whole)}\r\n" in head

    @pytest.mark.process
    def test_resume_a_download(self, site: Site, tmp_path: Path) -> None:
        whole = site("GET", "1.safetensors")[1]
        part = tmp_path / "1.safetensors"
        part.write_bytes(whole[:1234])
        self.curl("--continue-at", "-", "--output", str(part), f"{site.transport.metadata()}1.safetensors")
        assert part.read_bytes() == whole

    @pytest.mark.process
    def test_etag_of_the_last_time(self, site: Site, tmp_path: Path) -> None:
        url, tag, out = f"{site.transport.metadata()}1.safetensors", str(tmp_path / "etag"), str(tmp_path / "out")
        self.curl("--etag-save", tag, "--output", out, url)
        code = self.curl("--etag-compare", tag, "--output", f"{out}.again", "--write-out", "%{http_code}", url)
        assert code == b"304"
