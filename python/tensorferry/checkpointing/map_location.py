"""Where loaded tensors go, as ``torch.load`` has it."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidArgument
from ..state.build import Relocate


def relocation(map_location: Any) -> Relocate | None:
    """Returns what moves a storage in host memory to where ``map_location`` says, ``None`` if they all stay.

    What is returned raises ``InvalidArgument`` where a storage cannot be put, and what a callable raises.

    Raises:
        InvalidArgument: it is not a device, a dict or a callable
    """
    known = map_location is None or isinstance(map_location, (str, torch.device, dict))
    if not known and not callable(map_location):
        raise InvalidArgument(
            f"map_location must be a device, its name, a dict or a callable, not a {type(map_location).__name__}"
        )
    if isinstance(map_location, (str, torch.device)):
        try:
            if torch.device(map_location).type == "cpu":
                return None
        except RuntimeError as e:
            raise InvalidArgument(f"map_location {map_location!r} is not a device: {e}") from e
    restore = torch.serialization._get_restore_location(map_location)

    def relocate(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """Moves a storage, which was on ``location`` when it was saved, to where ``map_location`` says."""
        if map_location is None and location == "cpu":
            return storage
        try:
            moved = restore(storage, location)
        except (RuntimeError, AssertionError) as e:
            if not known:
                raise
            where = repr(location) if map_location is None else f"{map_location!r} (it was on {location!r})"
            raise InvalidArgument(
                f"map_location: a tensor cannot be put on {where}: {e}. Pass another default_map_location, such as "
                '"cpu"'
            ) from e
        return getattr(moved, "_untyped_storage", moved)

    return relocate
