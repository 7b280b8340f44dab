"""`make bench-objects` in miniature: it finishes, and what is loaded is what was saved; an eighth moves an eighth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import end

pytestmark = pytest.mark.nightly


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_bench_of_object_stores_runs(tmp_path):
    pytest.importorskip("obstore")
    # fmt: off
    command = [
        sys.executable, str(ROOT / "benches" / "objects.py"), "--rounds", "1", "--mib", "64", "--tensors", "50",
        "--servers", "memory", "--rows", "small,eighth", "--kinds", "tensorferry,SyncCheckpointer,obstore by hand",
        "--json", str(tmp_path / "objects.json"), "--folder", str(tmp_path),
    ]
    # fmt: on
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, cwd=ROOT, start_new_session=True) as bench:
        try:
            out, err = bench.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            end(bench)  # and the ranks with it
            raise
    assert bench.returncode == 0, err
    found = json.loads((tmp_path / "objects.json").read_text())
    assert not found["problems"]
    measured = {(sample["row"], sample["kind"]): sample for sample in found["samples"]}
    assert len(measured) == 4
    for sample in measured.values():
        assert sample["equal"]
        assert sample["save_s"] > 0
        assert sample["load_s"] > 0
    # No more than an eighth is read, and what it takes to read it.
    assert measured["eighth", "tensorferry"]["moved"] < 1.05
    assert measured["small", "obstore by hand"]["moved"] == 1
    assert all(kind in out for _, kind in measured)
