"""``tensorferry keeper``: its arguments go to the keeper's own parser, before this one is imported."""

from __future__ import annotations


def keeper(*arguments: str) -> int:
    """Holds the snapshots of this node's trainers in memory, so that they outlive them.

    Args:
        arguments: see `tensorferry keeper --help`
    """
    from ...checkpointing.keeper import command

    return command.main([*arguments])
