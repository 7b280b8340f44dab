"""What any HTTP client gets: resources, conditions, errors, and nothing without the random part."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import subprocess
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import torch

from exchange import TIMEOUT, connect, path
from tensorferry._native import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(90), pytest.mark.beyond_torchft]

CONTAINER = "1.safetensors"
#: What a peer with another ``num_chunks`` is told, in words that are also what its log shows.
OTHER_CHUNKS = "The transport that serves this step has another num_chunks than the one that asks: give both the same"
NO_FORMAT = "invalid url format, expected /checkpoint/step/key but got /checkpoint/"
NO_STEP = "invalid checkpoint requested, serving 1 but got step=2"


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


def test_resources_and_their_heads(site: Site) -> None:
    whole = site("GET", CONTAINER)[1]
    for resource in (CONTAINER, "1/header", "1/digests"):
        response, body = site("GET", resource)
        assert (response.status, response.version) == (200, 11)
        assert int(response.headers["Content-Length"]) == len(body) > 0
        head, nothing = site("HEAD", resource)
        assert (head.status, nothing) == (200, b"")
        assert head.headers["Content-Length"] == str(len(body))
    assert whole.startswith(site("GET", "1/header")[1])
    assert site("POST", CONTAINER)[0].status == 405


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Range": "bytes=8-99"}, 206),
        ({"Range": "bytes=99999999-"}, 416),
        ({"Range": "lines=0-1"}, 200),
        ({"If-Match": '"other", TAG', "Range": "bytes=0-3"}, 206),
        ({"If-Match": "*"}, 200),
        ({"If-Match": '"other"', "If-None-Match": "TAG"}, 412),
        ({"If-Match": "W/TAG", "Range": "bytes=0-3"}, 412),
        ({"If-None-Match": '"other", TAG'}, 304),
        ({"If-None-Match": '"other"'}, 200),
        ({"If-Range": "TAG", "Range": "bytes=0-3"}, 206),
        ({"If-Range": '"other"', "Range": "bytes=0-3"}, 200),
    ],
)
def test_ranges_and_conditions(headers: dict[str, str], status: int, site: Site) -> None:
    response, whole = site("GET", CONTAINER)
    tag = response.headers["ETag"]
    response, body = site("GET", CONTAINER, {name: value.replace("TAG", tag) for name, value in headers.items()})
    assert response.status == status
    first, _, last = headers.get("Range", "").removeprefix("bytes=").partition("-")
    expected = {200: whole, 206: whole[int(first) : int(last) + 1] if status == 206 else b"", 304: b""}
    assert body == expected.get(status, body)


@pytest.mark.parametrize(
    ("resource", "status", "reason"),
    [
        *((f"2{tail}", 400, NO_STEP) for tail in (".safetensors", "/header", "/digests", "/full", "/metadata", "/0")),
        *((name, 400, NO_FORMAT + name) for name in ("1/FULL", "1/full/", "1/1_0", "1/../2/full", "1/dcp/a/b")),
        *((name, None, None) for name in ("1", "1/", "x/full", "1/-1", "99999999999999999999.safetensors", "%00")),
        ("1/99", 404, f"list index out of range: there is no chunk 99. {OTHER_CHUNKS}"),
        ("1/dcp/x", 404, "there is no file x here"),
    ],
)
@pytest.mark.waits
def test_what_is_not_there(resource: str, status: int | None, reason: str | None, site: Site) -> None:
    response, _ = site("GET", resource)
    assert 400 <= response.status < 500
    assert (response.status, response.reason) == (status or response.status, reason or response.reason)


def test_a_step_without_a_state_is_404() -> None:
    server = Server(patience=TIMEOUT.total_seconds(), bind="127.0.0.1")
    server.allow(10)
    with pytest.raises(urllib.error.HTTPError, match="no state was sent: call send_checkpoint first") as refused:
        urllib.request.urlopen(server.url("127.0.0.1") + "10.safetensors")
    assert refused.value.code == 404
    refused.value.close()
    server.shutdown(1e19)


def test_without_the_random_part_all_is_404(site: Site) -> None:
    token = path(site.transport, "").split("/")[1]
    wrong = [token[:-1], token.upper() + "0", "0" * 32, token[1:] + token[0], f"{token}0", "", f"./{token}x"]
    paths = ["/", "/checkpoint/1/full", f"/checkpoint/{CONTAINER}", "/metrics", "/checkpoint/", "/favicon.ico", "*"]
    paths += [f"/{one}/{rest}" for one in wrong for rest in (f"checkpoint/{CONTAINER}", "metrics")]
    for disallowed in (False, True):
        for one in paths:
            assert site("GET", one, absolute=True)[0].status == 404, one
        assert site("GET", "/healthz", absolute=True)[0].status == 200
        assert site("GET", f"/{token}/metrics", absolute=True)[0].status == 200
        if not disallowed:
            site.transport.disallow_checkpoint()


@pytest.mark.process
@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_resumes_a_download_and_asks_by_etag(site: Site, tmp_path: Path) -> None:
    def curl(*arguments: str) -> bytes:
        # A proxy in the environment must not take part in this test.
        command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "30", *arguments]
        return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout

    url, whole = f"{site.transport.metadata()}{CONTAINER}", site("GET", CONTAINER)[1]
    assert curl("--fail", url) == whole
    assert curl("--range", "-4", url) == whole[-4:]
    part, tag = tmp_path / CONTAINER, str(tmp_path / "etag")
    part.write_bytes(whole[:1234])
    curl("--continue-at", "-", "--output", str(part), url)
    assert part.read_bytes() == whole
    curl("--etag-save", tag, "--output", str(part), url)
    code = curl("--etag-compare", tag, "--output", str(tmp_path / "again"), "--write-out", "%{http_code}", url)
    assert code == b"304"
