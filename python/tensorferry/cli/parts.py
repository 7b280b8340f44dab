"""A part of a state: what lies below some keys, such as the model in a checkpoint that has an optimizer as well."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import InvalidArgument

#: How many names an error has.
_NAMED = 5


class StatePart(NamedTuple):
    """Where a part lies in a state.

    Attributes:
        keys: the keys that lead from the state to the dict that holds the part
        prefix: what the keys of the part begin with there; empty if the whole dict is the part
    """

    keys: tuple[Any, ...]
    prefix: str

    def alone(self, state: Any) -> Any:
        """Returns the state without everything else; what is left has the keys that it had."""
        if not self.keys:
            return {key: value for key, value in state.items() if _begins(key, self.prefix)} if self.prefix else state
        return {self.keys[0]: StatePart(self.keys[1:], self.prefix).alone(state[self.keys[0]])}

    def of(self, state: Any) -> Any:
        """Returns the part itself, with the keys that it has below its own name."""
        for key in self.keys:
            state = state[key]
        if not self.prefix:
            return state
        return {key.removeprefix(self.prefix): value for key, value in state.items() if _begins(key, self.prefix)}


def find(state: Any, path: str) -> StatePart:
    """Returns where the part ``path`` lies: keys joined with dots, in nested dicts or within the names of one dict.

    Raises:
        InvalidArgument: there is no such part, or it is a value of its own and not a dict
    """
    if not path:
        raise InvalidArgument("--only must name a part of the state, such as model")
    found = _find_part(state, path)
    if found is None:
        raise InvalidArgument(f"--only {path}: there is no such part: {_keys_text(state)}")
    part = found.of(state)
    if not isinstance(part, dict):
        raise InvalidArgument(
            f"--only {path}: that is a {type(part).__name__}, and only a dict is a part that can be converted"
        )
    return found


def _find_part(state: Any, path: str) -> StatePart | None:
    if not isinstance(state, dict):
        return None
    for key in state:
        if str(key) == path:
            return StatePart((key,), "")
    for key in state:
        if path.startswith(f"{key}.") and (below := _find_part(state[key], path[len(str(key)) + 1 :])) is not None:
            return StatePart((key, *below.keys), below.prefix)
    prefix = f"{path}."
    return StatePart((), prefix) if any(_begins(key, prefix) for key in state) else None


def _begins(key: Any, prefix: str) -> bool:
    return isinstance(key, str) and key.startswith(prefix)


def _keys_text(state: Any) -> str:
    if not isinstance(state, dict):
        return f"the state is a {type(state).__name__}"
    more = f" and {len(state) - _NAMED} more" if len(state) > _NAMED else ""
    return f"the state has {', '.join(map(str, list(state)[:_NAMED]))}{more}" if state else "the state is empty"
