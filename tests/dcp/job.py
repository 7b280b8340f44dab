"""Jobs of several ranks that run functions together; each rank keeps a dict from one call to the next."""

from __future__ import annotations

import pytest
import ranks
from ranks import context

__all__ = ["Job", "context"]

_PATIENCE_S = 90


class _Rank:
    def __init__(self, rank, world):
        del rank, world
        self.kept = {}

    def run(self, function, *arguments):
        return function(self.kept, *arguments)

    def end(self):
        pass


class Job(ranks.Job):
    """``world`` processes; ``run`` makes each call a function with a dict of its own and the given arguments."""

    def __init__(self, world, daemon=True):
        # torch's ranks exchange their plans with its object collectives, which convert tensors to numpy arrays.
        pytest.importorskip("numpy", reason="torch.distributed's object collectives need numpy")
        super().__init__(f"{world} ranks", world, _Rank, _PATIENCE_S, daemon)

    def run(self, function, *arguments):
        """Returns what each rank returns; raises ``RankFailed`` with every rank's traceback if one fails."""
        return self("run", function, *arguments)
