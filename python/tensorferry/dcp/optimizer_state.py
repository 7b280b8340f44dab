"""Finds loads that leave an optimizer without its state, which torch does without a word.

A fresh optimizer has no state before its first step, and a load reads what the state to be loaded into has.
"""

from __future__ import annotations

import logging

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

logger = logging.getLogger("tensorferry")

_GROUPS, _STATE = "param_groups", "state."
_warned = False


def warn_of_missing(plan: LoadPlan, metadata: Metadata) -> None:
    """Warns, once in a process, of an optimizer whose options ``plan`` loads and whose state it leaves out."""
    global _warned
    if _warned:
        return
    wanted = [item.storage_index.fqn for item in plan.items]
    places = {fqn[: fqn.index(_GROUPS)] for fqn in wanted if _GROUPS in fqn}
    for place in sorted(places):
        state = place + _STATE
        if any(fqn.startswith(state) for fqn in wanted):
            continue
        if any(fqn.startswith(state) for fqn in metadata.state_dict_metadata):
            _warned = True
            logger.warning(
                "the checkpoint has the state of an optimizer (%s*) and the state to be loaded into has none, so none "
                "is loaded: a new optimizer has no state before its first step. Load into what "
                "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) returns, and call "
                "set_state_dict afterwards",
                state,
            )
            return
