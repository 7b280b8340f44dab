"""What a hostile header costs: memory in proportion to its length, in children whose peak is measured."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly


#: Bytes of memory for each byte of a header: ``DECODED_COST`` of ``rust/wire/src/container/mod.rs``, and the text.
ENGINE = 16 + 1
LENGTH = 8 << 20

HEADERS = {
    "entries of no bytes": lambda n: f'"{n:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    "metadata": lambda n: f'"{n:x}":""',
    "dimensions": lambda n: f'"{n:x}":{{"dtype":"U8","shape":[{"0," * 60}0],"data_offsets":[0,0]}}',
}

CODE = """
import sys
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM:")).split()[1]) << 10
from tensorferry._native import Stored
before = peak()
Stored.open(sys.argv[1], checksums=False)
print(peak() - before)
"""


def header(kind: str) -> bytes:
    parts, length, n = [], 2, 0
    while length < LENGTH:
        parts.append(HEADERS[kind](n))
        length += len(parts[-1]) + 1
        n += 1
    text = "{" + ",".join(parts) + "}"
    if kind == "metadata":
        text = '{"__metadata__":' + text + "}"
    data = text.encode() + b" " * (-len(text) % 8)
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_costs_memory_in_proportion_to_its_length(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(header(kind))
    done = subprocess.run([sys.executable, "-c", CODE, str(path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    cost = int(done.stdout) / path.stat().st_size
    assert 1 < cost < ENGINE, f"{cost:.1f} bytes for each byte"
