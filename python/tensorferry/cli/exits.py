"""The exit statuses of the command: nine, by what a script can do about them."""

from __future__ import annotations

from .. import errors

OK = 0
#: The answer is no, for example since two checkpoints differ.
NO = 1
USAGE = 2
#: There is no checkpoint, or not all of it.
INCOMPLETE = 3
#: It is damaged, or not what can be read or written.
UNREADABLE = 4
#: A peer, a store or this machine refuses or does not answer.
UNAVAILABLE = 9
UNPROVEN = 13
#: A mistake in tensorferry itself.
BUG = 70
#: 128 and the number of the signal that has ended it.
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143

#: By class; the first of an error's base classes that is listed counts.
STATUS: dict[type[BaseException], int] = {
    errors.InvalidArgument: USAGE,
    errors.IncompleteCheckpoint: INCOMPLETE,
    errors.CorruptCheckpoint: UNREADABLE,
    errors.ProtocolError: UNREADABLE,
    errors.UnsafePickle: UNREADABLE,
    errors.StateMismatch: UNREADABLE,
    errors.UnsupportedLeaf: UNREADABLE,
    errors.UnprovenSource: UNPROVEN,
    errors.TensorferryError: UNAVAILABLE,
}


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM."""


def status_of(error: BaseException) -> int:
    """Returns the exit status for an error that ends the command."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), BUG)
