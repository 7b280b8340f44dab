"""The exit statuses of the command, one for each class of errors that a script may want to tell apart."""

from __future__ import annotations

from .. import errors

OK = 0
#: The answer is no, for example since two checkpoints differ.
NO = 1
USAGE = 2
#: An error of tensorferry that has no status of its own.
OTHER = 15
#: A mistake in tensorferry itself.
BUG = 70
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143

#: By class; the first of an error's base classes that is listed counts.
STATUS: dict[type[BaseException], int] = {
    errors.InvalidArgument: USAGE,
    errors.IncompleteCheckpoint: 3,
    errors.CorruptCheckpoint: 4,
    errors.ProtocolError: 5,
    errors.UnsafePickle: 6,
    errors.StateMismatch: 7,
    errors.UnsupportedLeaf: 8,
    errors.ConnectError: 9,
    errors.FetchTimeout: 10,
    errors.SourceRefused: 11,
    errors.SourceChanged: 12,
    errors.UnprovenSource: 13,
    errors.StoreRefused: 16,
    errors.SystemRefused: 14,
    errors.TensorferryError: OTHER,
}


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM."""


def status_of(error: BaseException) -> int:
    """Returns the exit status for an error that ends the command."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), BUG)
