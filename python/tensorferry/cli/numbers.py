"""Keys that are numbers, which a distributed checkpoint has as text.

``torch.distributed.checkpoint`` joins keys with dots, and keeps no note of which were integers. The state of an
optimizer still says it: the groups of its parameters list their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def restore(state: Any) -> None:
    """Makes integers of the keys of each optimizer's state, in place, if its parameter groups list all of them so."""
    for _, node in _dicts(state, ""):
        of_parameters, groups = node.get("state"), node.get("param_groups")
        if isinstance(of_parameters, dict) and isinstance(groups, list | tuple):
            listed = {number for group in groups for number in _parameters(group)}
            if of_parameters and all(_is_number(key) and int(key) in listed for key in of_parameters):
                restored = {int(key): value for key, value in of_parameters.items()}
                of_parameters.clear()
                of_parameters.update(restored)


def dicts_with_numbers_as_keys(state: Any) -> list[str]:
    """Returns the paths of dicts whose keys are all numbers written as text: they may have been integers."""
    return [path or "the state" for path, node in _dicts(state, "") if node and all(map(_is_number, node))]


def _dicts(node: Any, path: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yields each dict below a node, with its keys joined with dots."""
    left = [(path, node)]
    while left:
        path, node = left.pop()
        if isinstance(node, dict):
            yield path, node
            below = list(node.items())
        elif isinstance(node, list | tuple):
            below = list(enumerate(node))
        else:
            continue
        left += [(f"{path}.{key}" if path else str(key), value) for key, value in reversed(below)]


def _parameters(group: Any) -> list[int]:
    listed = group.get("params") if isinstance(group, dict) else None
    return [number for number in listed if type(number) is int] if isinstance(listed, list | tuple) else []


def _is_number(key: Any) -> bool:
    return (
        isinstance(key, str) and key.isascii() and key.isdigit() and str(int(key)) == key
        if len(str(key)) < 20
        else False
    )
