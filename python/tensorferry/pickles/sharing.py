"""Containers of a state that several others hold: how much larger the state is when each of them is walked."""

from __future__ import annotations

from collections import deque
from typing import Any

from ..errors import ProtocolError

#: Walked containers and leaves up to which a state is never refused.
_MOST = 1_000_000
#: How many times as many as there are may be walked in a larger state.
_TIMES = 100
_CONTAINERS = (dict, list, tuple, deque)


def check_sharing(state: Any, name: str) -> None:
    """Checks that a state that was read does not hold the same containers so often that nobody can walk it.

    A pickle of two kilobytes can hold a list that has one list twice, which has another one twice, and so on: a walk of
    32 such levels meets four billion lists.

    Args:
        state: the state
        name: how the message names the file

    Raises:
        ProtocolError: it does
    """
    walked: dict[int, int] = {}
    distinct = 0
    # Each container twice: to add what it holds before it, and to add up what that came to.
    pending: list[tuple[Any, bool]] = [(state, False)]
    while pending:
        value, is_entered = pending.pop()
        if not isinstance(value, _CONTAINERS):
            continue
        held = value.values() if isinstance(value, dict) else value
        if is_entered:
            walked[id(value)] = 1 + sum(walked.get(id(one), 1) for one in held)
        elif id(value) not in walked:
            distinct += 1 + len(value)
            # A container that holds itself counts as a leaf there: flattening refuses it.
            walked[id(value)] = 1
            pending.append((value, True))
            pending.extend((one, False) for one in held)
    if walked.get(id(state), 1) > max(_MOST, _TIMES * distinct):
        raise ProtocolError(
            f"{name}: its containers hold one another so often that {walked[id(state)]} of them and of leaves would "
            f"have to be walked, where there are {distinct}"
        )
