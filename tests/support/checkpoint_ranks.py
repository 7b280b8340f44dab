"""The ranks of a job that saves or loads checkpoints, in processes of their own."""

import subprocess
import sys
from pathlib import Path


def run(what: str, world: int, folder: Path, expected: int = 0) -> None:
    """Runs a part of ``tests/checkpointing/rank_worker.py`` in ``world`` processes, which exit with ``expected``."""
    worker = Path(__file__).parents[1] / "checkpointing" / "rank_worker.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, worker, what, str(rank), str(world), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=100)
            assert rank.returncode == expected, output[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
