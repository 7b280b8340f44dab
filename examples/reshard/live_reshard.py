"""A job of four ranks feeds a job of two, live: weights and optimizer go from memory to memory, and both train on.

`make demo-reshard` runs this. It exits with 1 if a single bit of the state differs.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from functools import partial

from ranks import Job, RankFailed
from sharded_rank import Rank

#: Sums over ranks are computed in another order when the number of ranks differs.
_TOLERANCE = 1e-4


def proof(digests: dict[str, str]) -> str:
    """Return one digest of all values."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


def show(text: str) -> None:
    """Print one line of the story."""
    print(text, flush=True)


def main() -> int:
    logging.basicConfig(level=logging.INFO)
    with (
        Job("the large job", 4, partial(Rank, seed=1)) as large,
        Job("the small job", 2, partial(Rank, seed=2)) as small,
    ):
        try:
            return run(large, small)
        except RankFailed as e:
            show(f"FAILED: {e}")
            return 1


def run(large: Job, small: Job) -> int:
    """Run the story; return 0 if every bit arrived and both jobs continue with the same loss."""
    show(f"The large job, 4 ranks, has trained for 20 steps: loss {large('train', 20)[0]:.5f}.")
    show(f"The small job, 2 ranks, begins with other weights: loss {small('train', 1)[0]:.5f}.")
    before, other = large("digest")[0], small("digest")[0]
    show(f"  state of the large job   {proof(before)}, {len(before)} values")
    show(f"  state of the small job   {proof(other)}")
    strings = set(large("publish"))
    if len(strings) != 1:
        show("FAILED: the ranks of the large job name different publications")
        return 1
    reports = small("load", strings.pop())
    for number, report in enumerate(reports):
        show(f"Rank {number} of the small job took {report['wanted']} bytes of slices from the ranks that hold them.")
    after = small("digest")[0]
    show(f"  state of the small job   {proof(after)}")
    differing = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if differing or before == other:
        show(f"FAILED: {len(differing)} values differ: {', '.join(differing[:5])}")
        return 1
    show("Every value is the same to the last bit: weights, both moments of AdamW, and the step.")
    large("withdraw")
    losses = large("train", 10)[0], small("train", 10)[0]
    show(f"Both train on for 10 steps: loss {losses[0]:.5f} on 4 ranks, {losses[1]:.5f} on 2.")
    if abs(losses[0] - losses[1]) > _TOLERANCE:
        show("FAILED: the two jobs no longer agree")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
