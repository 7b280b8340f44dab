"""Checkpoints: ours beside torch's FileSystemWriter, its Hugging Face storage, torch.save and safetensors.

The same states, the same disk, the same minutes: every measurement is made by fresh processes, contenders take turns
within a round, forwards in even rounds and backwards in odd ones, and the table gives medians. Saves end when the bytes
are on the disk, for all contenders; loads go into tensors that exist. Torch has as many threads as there are cores for
each rank, writes no CRC-32, which its loads do not compare, and maps what `torch.save` wrote; "threads" are as many
files at a time as there are cores. Files are read twice: right after the save, with
the share of them that the kernel's page cache holds then, and once more after they were dropped from it. The floor is a
plain copy of as many bytes, from memory to memory, by as many threads as FileReader has.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from dcp_ranks import ALONE, FLOOR, MAPPED, MIB, SHAPES, Rank, drop_from_cache, share_in_cache
from machine import facts, others_busy
from report import end

sys.path.append(str(Path(__file__).parents[1] / "examples" / "reshard"))
from ranks import Job, RankFailed

_DCP = (
    *("tensorferry files", "tensorferry peers", "FileSystemWriter", "FileSystemWriter threads"),
    *("HuggingFaceStorage", "HuggingFaceStorage threads"),
)
CONTENDERS = (FLOOR, *_DCP, *(name for name in ALONE if name != FLOOR))
#: How many ranks save, and how many load.
WORLDS = {"large": (1, 1), "small": (1, 1), "reshard": (4, 3)}
_PATIENCE_S = 300


def measure(row: str, contender: str, scale: float, folder: Path) -> dict[str, Any]:
    """Measure one save and one load, by fresh processes."""
    path = folder / "checkpoint"
    worlds = WORLDS[row]
    saving, loading = (
        Job("the saving job", worlds[0], Rank, _PATIENCE_S),
        Job("the loading job", worlds[1], Rank, _PATIENCE_S),
    )
    try:
        nbytes = sum(saving("build", row, scale, 1))
        held = loading("build", row, scale, 2)
        saved = saving("save", contender, path)
        files = [file for file in [path, *path.rglob("*")] if file.is_file()]
        in_cache = share_in_cache(files)
        loaded = loading("load", contender, path, saved[0]["metadata"])
        equal = all(loading("equals", row, scale, 1))
        dropped = {}
        if files:
            loading("build", row, scale, 2)
            drop_from_cache(files)
            dropped["dropped_in_cache"] = share_in_cache(files)
            again = loading("load", contender, path, saved[0]["metadata"])
            dropped["dropped_load_s"] = max(told["s"] for told in again)
            equal = equal and all(loading("equals", row, scale, 1))
        on_disk = sum(file.stat().st_size for file in files)
    finally:
        saving.end()
        loading.end()
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    return {
        "bytes": nbytes,
        "on_disk": on_disk,
        "save_s": max(measured["s"] for measured in saved),
        "load_s": max(measured["s"] for measured in loaded),
        "save_extra": max(measured["extra"] for measured in saved),
        "load_extra": max(measured["extra"] for measured in loaded),
        "in_cache": in_cache,
        **dropped,
        "read_ratio": max(measured["read"] / n for measured, n in zip(loaded, held, strict=True)),
        "equal": equal,
    }


def _median(samples: list[dict[str, Any]], key: str) -> float:
    return statistics.median(sample[key] for sample in samples)


def as_text(results: dict[str, Any]) -> str:
    """Return the tables."""
    lines = []
    for row in results["rows"]:
        count = SHAPES[row["name"]][1]
        good = [s for s in row["samples"] if "error" not in s]
        size = good[0]["bytes"] if good else 0
        ranks = " -> ".join(str(n) for n in WORLDS[row["name"]])
        lines += [
            "",
            f"{row['name']}: {count} tensors, {size / MIB:.1f} MiB, ranks {ranks}; medians",
            "",
            "| | save ms | MiB/s | in the page cache then | load ms | MiB/s | load, dropped from it | MiB/s | "
            "read / needed | overhead a tensor | extra memory, save | load |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for contender in CONTENDERS:
            samples = [s for s in good if s["contender"] == contender]
            if not samples:
                continue
            disk = _median(samples, "on_disk")
            over = f"{(disk - size) / count:.0f} B" if disk else "-"
            read = "mapped" if contender in MAPPED else f"{_median(samples, 'read_ratio'):.3f}"
            extra = [f"{_median(samples, key) / MIB:.1f} MiB" for key in ("save_extra", "load_extra")]
            save, load, dropped = (
                f"{seconds * 1e3:.1f} | {size / MIB / seconds:.0f}" if seconds else "- | -"
                for seconds in (
                    _median(samples, "save_s"),
                    _median(samples, "load_s"),
                    _median(samples, "dropped_load_s") if disk else 0.0,
                )
            )
            cache = f"{_median(samples, 'in_cache'):.2f}" if disk else "-"
            lines.append(f"| {' | '.join([contender, save, cache, load, dropped, read, over, *extra])} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("build/bench/dcp.json"), help="samples")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="where checkpoints are written")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    parser.add_argument("--rows", default=",".join(SHAPES), help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="comma-separated")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the large tensors")
    options = parser.parse_args()
    contenders = options.contenders.split(",")
    for name in {*contenders} - {*CONTENDERS}:
        parser.error(f"no such contender: {name}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "version": 1,
        "machine": facts(),
        "others_busy": others_busy(),
        "rows": [],
        "problems": [],
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for row in options.rows.split(","):
            samples = []
            for number in range(options.rounds):
                turns = [c for c in contenders if WORLDS[row] == (1, 1) or c not in ALONE]
                for contender in turns[::-1] if number % 2 else turns:
                    try:
                        sample = measure(row, contender, options.scale, Path(folder))
                        if not sample["equal"]:
                            results["problems"].append(f"{row}, {contender}: what was loaded differs")
                    except RankFailed as e:
                        sample = {"error": str(e)}
                        results["problems"].append(f"{row}, {contender}: {e}")
                    samples.append({"contender": contender, "round": number, **sample})
                    print(f"{row}, round {number + 1}, {contender}", file=sys.stderr, flush=True)
            results["rows"].append({"name": row, "samples": samples})
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(as_text(results))
    return end(results["problems"])


if __name__ == "__main__":
    sys.exit(main())
