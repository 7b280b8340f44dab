"""The benches in miniature: each finishes in time, and what arrives is what was sent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import end

ROOT = Path(__file__).parents[2]
#: A bench starts dozens of processes.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300), pytest.mark.process]

#: By name: the bench, its arguments, and the package that it needs besides.
BENCHES = {
    "heals": (
        "side_by_side.py --quick --scale 0.002 --rounds 1 --rows large,small,tiny --stalls small --memory backed "
        "--contenders torchft:0,gloo,gloo+inplace,tensorferry,tensorferry+network+inplace,tensorferry+manager",
        "torchft",
    ),
    "jobs": (
        "side_by_side.py --quick --scale 0.01 --rounds 1 --rows job28,fsdp --memory backed "
        "--contenders torchft:4,tensorferry",
        "torchft",
    ),
    "checkpoints": (
        "dcp.py --rounds 1 --scale 0.01 --rows large,reshard "
        "--contenders tensorferry_files,tensorferry_peers,FileSystemWriter,safetensors --folder FOLDER",
        "safetensors",
    ),
    "checkpointers": (
        "checkpointing.py --mib 4 --rounds 1 --saves 2 --warm-up 1 --unloaded 0.05 --neighbours 1 "
        "--contenders tensorferry,tensorferry,_keeper,torch.save --folder FOLDER",
        "torch",
    ),
    "stores": (
        "objects.py --rounds 1 --mib 64 --tensors 50 --servers memory --rows small,eighth "
        "--kinds tensorferry,SyncCheckpointer,obstore_by_hand --folder FOLDER",
        "obstore",
    ),
    "lanes": ("scale.py --lanes 1,2,0 --mib 32 --rounds 1 --repeats 1", "torch"),
}


def samples_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [sample for row in results.get("rows", []) for sample in row["samples"]]
    return rows or list(results["samples"])


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_runs(name: str, tmp_path: Path) -> None:
    line, package = BENCHES[name]
    pytest.importorskip(package)
    bench, *arguments = (part.replace("_", " ").replace("FOLDER", str(tmp_path)) for part in line.split())
    command = [sys.executable, ROOT / "benches" / line.split()[0], *arguments, "--json", tmp_path / "results.json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, cwd=ROOT, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            end(process)  # and the measuring processes with it
            raise
    assert process.returncode == 0, err
    assert out.strip(), bench
    results = json.loads((tmp_path / "results.json").read_text())
    assert not results.get("problems")
    found = samples_of(results)
    assert found
    for sample in found:
        assert sample.get("equal", True) is sample.get("first_equal", True) is sample.get("second_equal", True) is True
        for figure in ("first_s", "send_s", "save_s", "load_s", "GB/s"):
            assert sample.get(figure, 1) > 0, (figure, sample)
