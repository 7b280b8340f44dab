"""A job of four ranks feeds a job of two, live: weights and optimizer go from memory to memory, and both train on.

`make demo-reshard` runs this. It exits with 1 if a single bit of the state differs.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import sharded_rank

_PATIENCE_S = 120
#: Imported once, not in each of the six ranks.
_PRELOAD = ["torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "tensorferry.dcp"]
#: Sums over ranks come in another order when there are other numbers of them.
_TOLERANCE = 1e-4


class Job:
    """The processes of a job; a call goes to all its ranks and gives what each returns."""

    def __init__(self, name: str, world: int, seed: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.name, self.pipes, self.processes = name, [], []
        for number in range(world):
            ours, theirs = context.Pipe()
            arguments = (theirs, number, world, seed, str(folder / name))
            process = context.Process(target=sharded_rank.main, args=arguments, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, method: str, *arguments: Any) -> list[Any]:
        """What `method` returns on each rank."""
        for pipe in self.pipes:
            pipe.send((method, *arguments))
        results = []
        for number, pipe in enumerate(self.pipes):
            if not pipe.poll(_PATIENCE_S):
                raise SystemExit(f"rank {number} of {self.name} does not answer to {method!r}")
            fine, result = pipe.recv()
            if not fine:
                raise SystemExit(f"rank {number} of {self.name} failed in {method!r}: {result}")
            results.append(result)
        return results

    def end(self) -> None:
        """Ends its processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(20)
            if process.is_alive():
                process.kill()


def proof(digests: dict[str, str]) -> str:
    """One digest of all."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


def tell(text: str) -> None:
    """One line of the story."""
    print(text, flush=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        large, small = (Job(name, n, seed, Path(folder)) for name, n, seed in (("large", 4, 1), ("small", 2, 2)))
        try:
            return run(large, small)
        finally:
            large.end()
            small.end()


def run(large: Job, small: Job) -> int:
    """The story; 0 if every bit arrived and both jobs go on alike."""
    tell(f"The large job, 4 ranks, has trained for 20 steps: loss {large('train', 20)[0]:.5f}.")
    tell(f"The small job, 2 ranks, begins with other weights: loss {small('train', 1)[0]:.5f}.")
    before, other = large("digest")[0], small("digest")[0]
    tell(f"  state of the large job   {proof(before)}, {len(before)} values")
    tell(f"  state of the small job   {proof(other)}")
    strings = set(large("publish"))
    if len(strings) != 1:
        tell("FAILED: the ranks of the large job name different publications")
        return 1
    reports = small("load", strings.pop())
    for number, report in enumerate(reports):
        tell(f"Rank {number} of the small job took {report['wanted']} bytes of slices from the ranks that hold them.")
    after = small("digest")[0]
    tell(f"  state of the small job   {proof(after)}")
    differing = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if differing or before == other:
        tell(f"FAILED: {len(differing)} values differ: {', '.join(differing[:5])}")
        return 1
    tell("Every value is the same to the last bit: weights, both moments of AdamW, and the step.")
    large("withdraw")
    losses = large("train", 10)[0], small("train", 10)[0]
    tell(f"Both train on for 10 steps: loss {losses[0]:.5f} on 4 ranks, {losses[1]:.5f} on 2.")
    if abs(losses[0] - losses[1]) > _TOLERANCE:
        tell("FAILED: the jobs went apart")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
