"""What any HTTP client gets: errors in torchft's words, and what curl needs."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch

from exchange import TIMEOUT, connect, path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.timeout(90), pytest.mark.beyond_torchft]

CONTAINER = "1.safetensors"
#: What a peer with another ``num_chunks`` is told, in words that are also what its log shows.
OTHER_CHUNKS = "The transport that serves this step has another num_chunks than the one that asks: give both the same"
NO_FORMAT = "invalid url format, expected /checkpoint/step/key but got /checkpoint/"
NO_STEP = "invalid checkpoint requested, serving 1 but got step=2"


@pytest.fixture
def source(open_transport: Callable[..., Any]) -> Any:
    transport = open_transport()
    transport.send_checkpoint([1], 1, {"w": torch.arange(1000.0), "o": {1, 2}}, TIMEOUT)
    return transport


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
def test_what_is_not_there(resource: str, status: int | None, reason: str | None, source: Any) -> None:
    with contextlib.closing(connect(source)) as connection:
        connection.request("GET", path(source, resource))
        response = connection.getresponse()
        response.read()
    assert 400 <= response.status < 500
    assert (response.status, response.reason) == (status or response.status, reason or response.reason)


@pytest.mark.process
@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_resumes_a_download_and_asks_by_etag(source: Any, tmp_path: Path) -> None:
    def curl(*arguments: str) -> bytes:
        # A proxy in the environment must not take part in this test.
        command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "30", *arguments]
        return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout

    url = f"{source.metadata()}{CONTAINER}"
    whole = curl("--fail", url)
    assert curl("--range", "-4", url) == whole[-4:]
    part, tag = tmp_path / CONTAINER, str(tmp_path / "etag")
    part.write_bytes(whole[:1234])
    curl("--continue-at", "-", "--output", str(part), url)
    assert part.read_bytes() == whole
    curl("--etag-save", tag, "--output", str(part), url)
    code = curl("--etag-compare", tag, "--output", str(tmp_path / "again"), "--write-out", "%{http_code}", url)
    assert code == b"304"
