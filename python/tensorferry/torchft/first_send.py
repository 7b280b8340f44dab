"""Does in a constructor what otherwise the first send of a process would do, while a trainer waits for it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import torch

from .._native import Server, Shelf
from ..memory.accelerator import ACCELERATOR
from ..memory.staging import HostStager
from ..pickles.allowlist import RefusalWarnings
from ..state.snapshot import SnapshotMode, StateSnapshot
from . import compat

logger = logging.getLogger("tensorferry")

#: The interpreter compiles a function for the types that it meets only after several calls.
_TIMES = 10

_prepared: set[SnapshotMode] = set()


def prepare(server: Server, snapshot: SnapshotMode, refusals: RefusalWarnings) -> None:
    """Looks up, once in a process, what a send needs: sends a small state to nobody.

    It is published where no peer can ask for it: on a shelf whose path nobody is given, and which is closed when this
    returns. What goes wrong is logged at DEBUG and never raised: the first send then does it all.

    Args:
        server: its gate stays closed, and it goes on serving nothing
        snapshot: how the sends that follow take their snapshots
        refusals: warn of the globals of what is sent
    """
    if snapshot in _prepared:
        return
    _prepared.add(snapshot)
    try:
        shelf = server.shelf()
        try:
            _send(shelf, snapshot, refusals)
        finally:
            shelf.close()
    except Exception:
        logger.debug("the first send is not prepared", exc_info=True)


def _send(shelf: Shelf, snapshot: SnapshotMode, refusals: RefusalWarnings) -> None:
    # Without the transport's own stager, which keeps buffers of the sizes that its sends need.
    stager = HostStager(ACCELERATOR)
    example = _example()
    for step in range(_TIMES):
        packed = StateSnapshot(example, stager, snapshot)
        packed.container().publish(shelf, step, alternate=compat.bodies(packed.rebuild, 0))
        refusals.warn(packed.globals)
        shelf.withdraw(0.0)
    stager.close()


def _example() -> dict[str, Any]:
    """Returns a small state like those that torchft's Manager sends: a module's, with a view, and an optimizer's."""
    memory = torch.zeros(8, device="cpu")
    weight = torch.nn.Parameter(torch.zeros(2, 2, device="cpu"))
    module = OrderedDict(weight=weight, bias=torch.zeros(2, device="cpu"), tail=memory[4:])
    module._metadata = OrderedDict([("", {"version": 1})])  # type: ignore[attr-defined]
    moments = {"step": torch.zeros((), device="cpu"), "exp_avg": torch.zeros(2, 2, device="cpu")}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "amsgrad": False, "params": [0]}
    optimizer = {"state": {0: moments}, "param_groups": [group]}
    return {
        "user": {"default": {"model": module, "optimizer": optimizer, "list": [memory]}},
        "torchft": {"step": 0, "batches_committed": 0},
    }
