"""`benches/into_docs.py`: each block has a writer, each writer a block, and what it writes is in place."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def into_docs(monkeypatch):
    for folder in ("benches", "examples/reshard"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    # Other tests have modules of the same names.
    for path in (ROOT / "benches").glob("*.py"):
        monkeypatch.setitem(sys.modules, path.stem, None)
        del sys.modules[path.stem]
    import into_docs

    return into_docs


def test_each_block_has_a_writer_and_each_writer_a_block(into_docs):
    pages = "".join((ROOT / page).read_text() for page in into_docs.PAGES)
    assert {block["name"] for block in into_docs._BLOCK.finditer(pages)} == set(into_docs.BLOCKS)
    assert len(re.findall("<!-- figures", pages)) == 2 * len(into_docs._BLOCK.findall(pages))


def saved(still, durable, loads):
    saves = [{"stand_still_s": 9.0, "durable_s": 9.0, "extra": 1 << 20}]
    saves += [{"stand_still_s": still, "durable_s": durable, "rate": 0.9} for _ in range(2)]
    return {"bytes": 64 << 20, "saves": saves, "loads": loads, "equal": True}


def test_a_block_names_the_best_of_the_others(into_docs, tmp_path):
    samples = [
        saved(0.030, 0.3, {"load": 0.05}) | {"contender": "tensorferry"},
        saved(0.025, 0.6, {"load": 0.5, "torch.load, mapped": 0.06}) | {
            "contender": "torch AsyncCheckpointer, staged at once"
        },
        saved(0.2, 0.4, {"load": 0.2}) | {"contender": "dcp.async_save, thread"},
    ]  # fmt: skip
    results = {"samples": samples, "warm_up": 1, "machine": {"cores": 2}, "others_busy": 0.0}
    (tmp_path / "checkpointing.json").write_text(json.dumps(results))
    before = "before\n<!-- figures checkpointers: begin -->\nold\n<!-- figures checkpointers: end -->\nbehind\n"
    before += "<!-- figures megatron: begin -->\nkept\n<!-- figures megatron: end -->\n"
    after = into_docs.brought(before, tmp_path)
    assert after.startswith(
        "before\n<!-- figures checkpointers: begin -->\n64 MiB, 2 cores, 1 interleaved round, 2 saves"
    )
    assert after.endswith("behind\n<!-- figures megatron: begin -->\nkept\n<!-- figures megatron: end -->\n")
    assert "old" not in after
    assert (
        "| torch AsyncCheckpointer, staged at once | 25 | 0.90 (0.90-0.90) | 600 | 60, torch.load, mapped | 1 |"
        in after
    )
    assert (
        "standing still 1.20 of what torch AsyncCheckpointer, staged at once takes, "
        "until it is on the disk 0.75 of what dcp.async_save, thread takes, "
        "a load 0.83 of what torch AsyncCheckpointer, staged at once takes."
    ) in after
