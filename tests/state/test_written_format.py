"""The formats on the network and on the disk stay what they are: bytes of commit 7b37416, read and written again."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import written_format
from written_format import (
    CONTAINER,
    DIGESTS,
    FOLDER,
    SAFE_GLOBALS,
    STEP,
    STOCK,
    TORCH,
)

from equality import assert_same_state
from exchange import Listener
from hostile_servers import answer, head_of
from tensorferry.dcp import FileReader

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.beyond_torchft,
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

TIMEOUT = timedelta(seconds=30)
same_torch = pytest.mark.skipif(
    not torch.__version__.startswith(f"{TORCH}."), reason=f"torch's part of the bytes is that of torch {TORCH}"
)


def receive(bodies: dict[str, bytes], prefix: str, open_transport: Callable[..., Any], **options: Any) -> Any:
    """Receives from a server that has these bodies and nothing else."""

    def serve(connection: socket.socket) -> None:
        head = head_of(connection).decode()
        body = bodies.get(head.split(" ")[1].partition("?")[0].removeprefix(prefix))
        if body is None:
            connection.sendall(answer("404 Not Found", b"", "Connection: close"))
        elif found := re.search(r"range: bytes=(\d+)-(\d*)", head, re.IGNORECASE):
            first = int(found[1])
            part = body[first : int(found[2] or len(body)) + 1]
            ranged = f"Content-Range: bytes {first}-{first + len(part) - 1}/{len(body)}"
            connection.sendall(answer("206 Partial Content", part, 'ETag: "kept"', ranged, "Connection: close"))
        else:
            connection.sendall(answer("200 OK", body, 'ETag: "kept"', "Connection: close"))

    with Listener(serve) as listener:
        metadata = f"http://127.0.0.1:{listener.port}{prefix}"
        return open_transport(**options).recv_checkpoint(0, metadata, STEP, TIMEOUT)


#: The state that was kept has a DTensor, whose mesh is pickled by the names of the torch that wrote it.
same_mesh = pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed._mesh_layout") is None,
    reason="the kept state has a DTensor of torch 2.15, whose mesh names a module that this torch does not have",
)


ANSWERS = {f"{STEP}.safetensors": CONTAINER.read_bytes(), f"{STEP}/digests": DIGESTS.read_bytes()}
OPTIONS: list[dict[str, Any]] = [{"trust_pickle": True}, {"safe_globals": SAFE_GLOBALS}]


@same_mesh
@pytest.mark.parametrize("options", OPTIONS)
def test_a_kept_container_is_received(options: dict[str, Any], open_transport: Callable[..., Any]) -> None:
    state = receive(ANSWERS, f"/{'a' * 32}/checkpoint/", open_transport, **options)
    assert_same_state(state, written_format.transport_state())


def test_a_kept_body_of_torchft_is_received(open_transport: Callable[..., Any]) -> None:
    state = receive({f"{STEP}/full": STOCK.read_bytes()}, "/checkpoint/", open_transport)
    assert_same_state(state, written_format.stock_state())


def test_a_kept_folder_is_loaded() -> None:
    expected = written_format.job_state()
    # The tensors that are loaded into are dense.
    expected["model"]["column"] = expected["model"]["column"].contiguous()
    state = zeroed(expected)
    dcp.load(state, storage_reader=FileReader(FOLDER))
    assert_same_state(state, expected)


def zeroed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeroed(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(zeroed(one) for one in value)
    return None


@pytest.mark.process
@same_torch
@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="it shares more of a program's equal strings, which pickle then writes once"
)
def test_the_same_bytes_are_written(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", written_format.__file__, str(tmp_path)]
    subprocess.run(command, check=True, timeout=100)
    kept = {path.relative_to(CONTAINER.parent) for path in (CONTAINER, DIGESTS, STOCK, *FOLDER.iterdir())}
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*.*") if path.is_file()} == kept
    for path in kept:
        assert (tmp_path / path).read_bytes() == (CONTAINER.parent / path).read_bytes(), path


def test_names_of_ours_in_a_pickle() -> None:
    """Every later version has to find the names that a pickle can contain; these are all of them."""
    (manifest,) = re.findall(rb'{"version":1,"flags".*', CONTAINER.read_bytes().partition(b"\x80\x04\x95")[0])
    named = {name for name in json.loads(manifest)["globals"] if name.startswith("tensorferry")}
    assert named == {"tensorferry._rebuild.with_grad", "tensorferry._rebuild.rebuild_dtensor"}
