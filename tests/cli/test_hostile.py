"""What a user or a stranger can hand to the command: odd tensors, devices as outputs, closed or full outputs."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forked
from tensorferry._native import Remote
from tensorferry.cli import exits
from tensorferry.storage.download import partial_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.beyond_torchft,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def quantized(scale: float = 0.5) -> torch.Tensor:
    """A tensor of integers that stand for multiples of ``scale``."""
    return torch.quantize_per_tensor(torch.ones(3), scale, 0, torch.quint8)


def sparse(value: float = 1.0) -> torch.Tensor:
    """A diagonal matrix that stores its diagonal only."""
    return (torch.eye(3) * value).to_sparse()


def header_file(path: Path, header: dict[str, Any], payload: bytes) -> Path:
    """A safetensors file of another program."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path


def in_a_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Runs the command in a process of its own, which may end by a signal or without standard output."""
    command = [sys.executable, "-m", "tensorferry", *map(str, arguments)]
    return forked.run(command, timeout=110, **{"capture_output": True, **options})


@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch-dcp"])
@pytest.mark.parametrize("kind", ["meta", "quantized"])
def test_leaves_that_a_format_cannot_hold_are_refused_by_name(
    run: Callable[..., Any], tmp_path: Path, to: str, kind: str
) -> None:
    leaf = torch.empty(3, device="meta") if kind == "meta" else quantized()
    torch.save({"outer": {"leaf": leaf}}, tmp_path / "state.pt")
    told = run("convert", tmp_path / "state.pt", tmp_path / "out", "--to", to)
    assert told.status == exits.UNREADABLE
    assert "outer.leaf" in told.err
    assert not (tmp_path / "out").exists()


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_quantized_tensors_of_a_distributed_checkpoint_do_not_end_the_process(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"q": quantized()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    told = in_a_process("convert", tmp_path / "dcp", tmp_path / "out.pt")
    assert told.returncode == exits.UNREADABLE, told.stderr
    assert b"q is of torch.quint8" in told.stderr


def test_sparse_and_quantized_tensors_equal_themselves_only(run: Callable[..., Any], tmp_path: Path) -> None:
    states = {
        "one": {"s": sparse(), "r": sparse().to_sparse_csr(), "q": quantized()},
        "same": {"s": sparse(), "r": sparse().to_sparse_csr(), "q": quantized()},
        "other": {"s": sparse(2.0), "r": sparse(2.0).to_sparse_csr(), "q": quantized(0.25)},
    }
    for name, state in states.items():
        torch.save(state, tmp_path / f"{name}.pt")
    assert run("inspect", tmp_path / "one.pt").status == exits.OK
    assert run("diff", tmp_path / "one.pt", tmp_path / "same.pt").status == exits.OK
    told = run("diff", tmp_path / "one.pt", tmp_path / "other.pt", "--json")
    assert told.status == exits.NO
    assert {one["path"] for one in json.loads(told.out)["differences"]} == {"s", "r", "q"}


def test_a_view_larger_than_the_machine_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1).expand(2**46)}, tmp_path / "huge.pt")
    assert run("diff", tmp_path / "huge.pt", tmp_path / "huge.pt").status == exits.UNAVAILABLE
    told = run("convert", tmp_path / "huge.pt", tmp_path / "out", "--to", "safetensors")
    assert told.status == exits.UNAVAILABLE
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["convert", "serve"])
def test_too_many_dimensions_are_refused_by_name(run: Callable[..., Any], tmp_path: Path, verb: str) -> None:
    header = {"deep": {"dtype": "U8", "shape": [1] * 300, "data_offsets": [0, 1]}}
    path = header_file(tmp_path / "a.safetensors", header, b"x")
    told = run(verb, path, *([tmp_path / "out.pt"] if verb == "convert" else []))
    assert told.status == exits.UNREADABLE
    assert "deep has 300 dimensions" in told.err


def test_pull_does_not_replace_what_is_no_file(run: Callable[..., Any], publish: Any, tmp_path: Path) -> None:
    metadata = publish({"w": torch.ones(3)})
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to("target")
    for name in ("pipe", "link"):
        before = (tmp_path / name).lstat().st_ino
        told = run("pull", metadata, "-o", tmp_path / name, "--quiet")
        assert told.status == exits.USAGE, told.err
        assert (tmp_path / name).lstat().st_ino == before
    assert (tmp_path / "target").read_text() == "kept"


@pytest.mark.process
def test_outputs_that_are_closed_full_or_ascii(tmp_path: Path) -> None:
    header = {"é\u202e": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    path = header_file(tmp_path / "a.safetensors", header, b"x")
    told = in_a_process("inspect", path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert told.returncode == exits.OK, told.stderr
    assert rb"\xe9\u202e" in told.stdout
    closed = f'exec "{sys.executable}" -m tensorferry inspect "{path}" >&- 2>&-'
    assert subprocess.run(["sh", "-c", closed], timeout=110, check=False).returncode == exits.OK
    with open("/dev/full", "wb") as full:
        told = in_a_process("inspect", path, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert told.returncode == exits.UNAVAILABLE
    assert b"No space left on device" in told.stderr
    assert b"please report" not in told.stderr


@pytest.mark.parametrize("to", ["dcp", "torch-dcp"])
def test_leaves_that_would_have_one_name_are_refused(run: Callable[..., Any], tmp_path: Path, to: str) -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, tmp_path / "a.pt")
    told = run("convert", tmp_path / "a.pt", tmp_path / "out", "--to", to)
    assert (told.status, os.listdir(tmp_path)) == (exits.UNREADABLE, ["a.pt"])
    assert "a.b" in told.err


def test_pull_does_not_write_through_a_hard_link(run: Callable[..., Any], publish: Any, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    metadata = publish({"w": torch.ones(3)})
    with contextlib.closing(Remote.open([metadata], 5, timeout=30)) as remote:
        os.link(tmp_path / "precious", partial_of(tmp_path / "a", remote, 5))
    told = run("pull", metadata, "-o", tmp_path / "a", "--quiet")
    assert told.status == exits.USAGE, told.err
    assert "has another name" in told.err
    assert (tmp_path / "precious").read_text() == "kept"
