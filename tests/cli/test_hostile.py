"""What a user or a stranger can hand to the command: odd tensors, closed or full outputs, servers that mean harm."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forked
import hostile_servers
from fuzzing import status
from tensorferry._native import Remote
from tensorferry.cli import exits, peers
from tensorferry.cli.download import partial_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.beyond_torchft,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


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
def test_leaves_that_a_format_cannot_hold_are_refused_by_name(run: Callable[..., Any], tmp_path: Path, to: str) -> None:
    torch.save({"outer": {"leaf": torch.empty(3, device="meta")}}, tmp_path / "state.pt")
    told = run("convert", tmp_path / "state.pt", tmp_path / "out", "--to", to)
    assert told.status == exits.UNREADABLE
    assert "outer.leaf" in told.err
    assert not (tmp_path / "out").exists()


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_quantized_tensors_of_a_distributed_checkpoint_do_not_end_the_process(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(
        {"q": torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8)},
        checkpoint_id=tmp_path / "dcp",
        no_dist=True,
    )
    told = in_a_process("convert", tmp_path / "dcp", tmp_path / "out.pt")
    assert told.returncode == exits.UNREADABLE, told.stderr
    assert b"q is of torch.quint8" in told.stderr


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


MIB = 1 << 20
#: By verb, what it is given, with the hostile metadata in place of HOSTILE and that of the honest source of HONEST.
VERBS: dict[str, list[str]] = {
    "pull": ["pull", "HOSTILE", "-o", "OUTPUT", "--quiet"],
    "inspect": ["inspect", "HOSTILE"],
    "diff": ["diff", "HONEST", "HOSTILE"],
    "doctor": ["doctor", "HOSTILE"],
    "digests": ["inspect", "HOSTILE", "--digests", "--json"],
}


@pytest.fixture
def honest(publish: Callable[..., str]) -> str:
    return publish({"w": torch.ones(3 * MIB, dtype=torch.uint8), "b": torch.zeros(5)}, same_host=False)


def is_quiet(text: str) -> bool:
    """Whether a text has nothing that a terminal acts upon, but the ends of its lines."""
    return all(c == "\n" or c.isprintable() for c in text)


@pytest.mark.parametrize("name", hostile_servers.SERVERS)
def test_a_hostile_server_gets_a_line_and_a_status(
    name: str,
    run: Callable[..., Any],
    honest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    every = pytestconfig.getoption("--every-verb")
    # In a short run a server meets one of the verbs that fetch, and those that answer everything alike also meet top.
    number = list(hostile_servers.SERVERS).index(name)
    verbs = list(VERBS) if every else [list(VERBS)[number % len(VERBS)]]
    if every:
        monkeypatch.setattr(hostile_servers, "many", 1_000_000)
    monkeypatch.setattr(peers, "_PATIENCE_S", 0.3)
    output = tmp_path / "a"
    # What is only odd needs its time; the others would use up any.
    slow = name in hostile_servers.CONTENT
    with hostile_servers.SERVERS[name](honest) as hostile:
        values = {"HOSTILE": hostile, "HONEST": honest, "OUTPUT": str(output)}
        for verb in [*verbs, *(["top"] if every or name in hostile_servers.ANSWERS else [])]:
            given = (
                ["top", "HOSTILE", "--once"] if verb == "top" else [*VERBS[verb], "--timeout", "60" if slow else "0.4"]
            )
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
            told = run(*(values.get(argument, argument) for argument in given))
            grown = status("VmHWM") - before
            assert is_quiet(told.out + told.err), (verb, told)
            assert "Traceback" not in told.err, (verb, told)
            assert told.status != exits.BUG, (verb, told)
            if not slow and not (verb == "top" and told.status == exits.OK):
                assert told.status != exits.OK, (verb, told)
                assert len(told.err.splitlines()) <= 1, (verb, told)
                assert told.err or verb in ("doctor", "top"), (verb, told)
                assert not output.exists()
            # What a million leaves take is bounded by their number.
            assert grown < (2048 if every else 512) * MIB, (verb, f"{grown // MIB} MiB")
            output.unlink(missing_ok=True)


def test_a_redirect_leads_nowhere(run: Callable[..., Any], honest: str, tmp_path: Path) -> None:
    with (
        hostile_servers.Relay(honest, hostile_servers.unchanged) as elsewhere,
        hostile_servers.redirecting(elsewhere.metadata) as hostile,
    ):
        assert run("pull", hostile, "-o", tmp_path / "a", "--timeout", "2").status == exits.UNAVAILABLE
        assert elsewhere.requests == 0


@pytest.mark.waits
def test_a_wrong_step_is_refused_with_the_one_that_is_served(
    run: Callable[..., Any], publish: Any, tmp_path: Path
) -> None:
    five = publish({"w": torch.ones(3)})
    told = run("pull", five, "-o", tmp_path / "a", "--step", "6", "--timeout", "5")
    assert (told.status, "WrongStep" in told.err) == (exits.UNAVAILABLE, True), told
    assert "serving 5 but got" in told.err
    assert os.listdir(tmp_path) == []
    for step in ("99999999999999999999", "-9223372036854775809"):
        assert run("inspect", five, f"--step={step}").status == exits.USAGE
