"""Options as tests write them, flat: those of a ``Network`` beside those of what takes it."""

from __future__ import annotations

import dataclasses
from typing import Any

from tensorferry import Network

_NAMES = {field.name for field in dataclasses.fields(Network)}


def networked(options: dict[str, Any]) -> dict[str, Any]:
    """Returns ``options`` with those of a ``Network`` in one."""
    own = {name: options[name] for name in options.keys() & _NAMES}
    rest = {name: value for name, value in options.items() if name not in own}
    return {**rest, "network": Network(**own)} if own else rest
