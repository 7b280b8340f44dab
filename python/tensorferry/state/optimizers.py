"""Finds loads that leave an optimizer without its state, which torch does without a word. Every load into a state asks.

A fresh optimizer has no state before its first step, and a load reads what the state to be loaded into has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from .grammar import Node, children

logger = logging.getLogger("tensorferry")

#: In the names of what an optimizer has before its first step: its options, and Megatron's copies of parameters.
_SIGNS = ("param_groups", "fp32_param.")
_GROUPS, _STATE = "param_groups", "state"
_warned = False


def warn_of_missing(wanted: Iterable[str], present: Callable[[], Iterable[str]]) -> None:
    """Warns, once in a process, of an optimizer whose options are loaded and whose state is left out.

    Args:
        wanted: the names of what is loaded, whose keys are joined with dots
        present: returns those of what the checkpoint has; asked only if an optimizer without state is among ``wanted``
    """
    if _warned:
        return
    names = [*wanted]
    places = {name[: name.index(sign)] for name in names for sign in _SIGNS if sign in name}
    bare = [f"{place}{_STATE}." for place in sorted(places)]
    bare = [state for state in bare if not any(name.startswith(state) for name in names)]
    there = [*present()] if bare else []
    for state in bare:
        if any(name.startswith(state) for name in there):
            _warn(state)
            return


def warn_of_bare(target: dict[Any, Any], node: Node, path: str) -> None:
    """Warns as :func:`warn_of_missing` if ``target``, which is loaded from ``node``, is an optimizer without state."""
    own = target.get(_STATE, {})
    if _warned or _GROUPS not in target or not isinstance(own, dict) or own:
        return
    state = next((child for _, key, child in children(node) if key == _STATE), 0)
    # None takes whatever there is.
    if type(state) is not int and any(children(state)):
        _warn(f"{path}.{_STATE}." if path else f"{_STATE}.")


def _warn(state: str) -> None:
    global _warned
    _warned = True
    logger.warning(
        "the checkpoint has the state of an optimizer (%s*) and the state to be loaded into has none, so none "
        "is loaded: a new optimizer has no state before its first step. Load into what "
        "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) returns while no parameter has a "
        "gradient (optimizer.zero_grad()), and call set_state_dict afterwards",
        state,
    )
