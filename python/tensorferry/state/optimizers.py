"""Finds loads that leave an optimizer without its state, which torch does without a word. Every load into a state asks.

A fresh optimizer has no state before its first step, and a load reads what the state to be loaded into has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
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


def warn_of_missing_in(target: Any, tree: Node) -> None:
    """Warns as :func:`warn_of_missing` of the optimizers in a state that is loaded from one with the tree ``tree``."""
    if not _warned and (state := next(_without_state(target, tree, ""), None)) is not None:
        _warn(state)


def _without_state(target: Any, node: Node, path: str) -> Iterator[str]:
    """Yields the name of each optimizer's state that ``node`` has and ``target``, in its place, has not."""
    if type(node) is int:
        return
    below = list(children(node))
    if below and below[0][0] == "same":
        yield from _without_state(target, below[0][2], path)
    elif isinstance(target, dict):
        there = {key: child for step, key, child in below if step == "key" and type(key) is not list}
        state = there.get(_STATE, 0)
        # None takes whatever there is.
        if _GROUPS in target and target.get(_STATE, {}) == {} and type(state) is not int and any(children(state)):
            yield f"{path}{_STATE}."
        for key, child in there.items():
            if key in target:
                yield from _without_state(target[key], child, f"{path}{key}.")
    elif isinstance(target, (list, tuple)):
        for (_, number, child), value in zip(below, target, strict=False):
            yield from _without_state(value, child, f"{path}{number}.")


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
