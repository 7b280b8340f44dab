"""Loads the states of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorferry.checkpointing import loading


def load_state(path: Path, state_dict: Any = None, **options: Any) -> Any:
    """The state alone, without what it lacks."""
    return loading.read(path, state_dict, **options)[0]
