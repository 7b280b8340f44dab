"""The exceptions of this package, one class for each thing that a user can do about a failure.

Every class is a :class:`TensorferryError` and also derives from the builtin or ``urllib`` class that callers of
torchft's ``HTTPTransport`` already catch.
"""

from __future__ import annotations

import errno
import os
import pickle
import resource
from email.message import Message
from typing import Any
from urllib.error import HTTPError, URLError

__all__ = [
    "ConnectError",
    "CorruptCheckpoint",
    "FetchTimeout",
    "ForkedProcess",
    "HalfReceived",
    "IncompleteCheckpoint",
    "InvalidArgument",
    "ProtocolError",
    "RankFailed",
    "SourceChanged",
    "SourceRefused",
    "StateMismatch",
    "StoreRefused",
    "SystemRefused",
    "TensorferryError",
    "TornCheckpoint",
    "TransferCancelled",
    "TransportClosed",
    "UnprovenSource",
    "UnsafePickle",
    "UnsupportedLeaf",
    "WriterLost",
    "WrongStep",
]

#: How the system says that a process, or the machine, has no file descriptor left.
_TOO_MANY = (os.strerror(errno.EMFILE), os.strerror(errno.ENFILE))


class TensorferryError(Exception):
    """The base class of all errors that tensorferry raises itself."""


class FetchTimeout(TensorferryError, URLError, TimeoutError):
    """The deadline of a receive passed, or the source sent nothing for too long."""


class _Unwrapped(URLError):
    """A ``URLError`` whose text is its reason alone. Only of time-outs torchft asks for ``<urlopen error ...>``."""

    def __str__(self) -> str:
        return str(self.reason)


class ConnectError(TensorferryError, _Unwrapped, ConnectionError):
    """No source could be reached, or the connections to all of them were lost."""


class SourceRefused(TensorferryError, HTTPError):
    """The source answered with an HTTP error; ``code`` is its status."""

    @staticmethod
    def of(code: int, message: str) -> SourceRefused:
        """Returns the error for an HTTP response with status ``code`` and this message."""
        wrong_step = code == 400 and "invalid checkpoint requested" in message
        return _refused(WrongStep if wrong_step else SourceRefused, code, message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets the error be pickled and copied, which the standard library's ``HTTPError`` does not.

        Torch's checkpoint collectives send the errors of a rank to the others.
        """
        notes = {"__notes__": list(self.__notes__)} if hasattr(self, "__notes__") else None
        return _refused, (type(self), self.code, self.msg), notes


def _refused(kind: type[SourceRefused], code: int, message: str) -> SourceRefused:
    return kind("", code, message, Message(), None)


class WrongStep(SourceRefused):
    """The source serves another step than the requested one."""


class SourceChanged(TensorferryError, RuntimeError):
    """The source replaced or withdrew the snapshot, or a save the checkpoint, while it was being read."""


class ProtocolError(TensorferryError, ValueError):
    """The data that the source sent, or that a file holds, is not valid."""


class CorruptCheckpoint(TensorferryError, ValueError):
    """Bytes did not match their checksum, not even when they were fetched again."""


class TornCheckpoint(CorruptCheckpoint):
    """The source changed its state while serving it; no one moment was found at which all received bytes were valid.

    The source has to call ``disallow_checkpoint()`` before it changes the state, or to serve a private copy
    (``snapshot="copy"``).
    """


class StateMismatch(TensorferryError, ValueError, RuntimeError):
    """The source's state cannot be received into the receiver's own tensors.

    The receiver's tensors differ in shape, dtype, kind (dense or sparse, say) or part, have no tensor in their place,
    are in a list of another length, cannot be written to, share memory that the source's tensors do not share, or were
    given other memory during the receive; or, with ``strict=True``, one side has tensors that the other one lacks. A
    ``RuntimeError`` as well, which is what torch raises for it.
    """


class UnprovenSource(TensorferryError, _Unwrapped, PermissionError):
    """The source cannot prove its identity, or does not encrypt although the receiver asks for TLS.

    It does not know the shared secret, or shows another certificate than its metadata names.
    """


class UnsupportedLeaf(TensorferryError, TypeError):
    """A leaf of the state cannot be sent; the message names its path."""


class UnsafePickle(TensorferryError, pickle.UnpicklingError):
    """The pickle of a source or a file needs something that is not on the allow-list."""


class ForkedProcess(TensorferryError, RuntimeError):
    """A transport, or another object that belongs to its process, was used in one forked from that."""


class TransportClosed(TensorferryError, RuntimeError):
    """A transport, a writer or a checkpointer was used after its ``shutdown`` or ``close``."""


class HalfReceived(TensorferryError, RuntimeError):
    """A receive into the live state has failed midway, and the state was to be used as if it were whole."""


class IncompleteCheckpoint(TensorferryError, FileNotFoundError):
    """The folder holds no checkpoint, or only what an interrupted save has left; or a save was overtaken by another.

    That one began later and has finished first, or has removed a file of this one.
    """


class WriterLost(TensorferryError, RuntimeError):
    """The process that writes checkpoints ended before it had confirmed a save; a new one writes the next save."""


class RankFailed(TensorferryError, RuntimeError):
    """Another rank of a save or load has failed, or did not come in time; the message names it."""


class InvalidArgument(TensorferryError, ValueError):
    """An argument has a wrong type or value, or cannot be used in this situation."""


class SystemRefused(TensorferryError, OSError):
    """The operating system refused memory, a file, a socket or a thread."""

    def __init__(self, *args: Any) -> None:
        """Adds the limit to a message that says that too many files are open."""
        match args:
            case [*number, str(message)] if any(map(message.__contains__, _TOO_MANY)) and "ulimit -n" not in message:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                message += f". A process may have {limit} files and sockets open here: raise it (ulimit -n)"
                args = (*number, message)
        super().__init__(*args)


class StoreRefused(TensorferryError, OSError):
    """An object store refused a request; the message names the object and what the store said."""


class TransferCancelled(TensorferryError, RuntimeError):
    """The transfer was cancelled."""


def class_of(error: BaseException) -> str:
    """Returns the name of the class of this module that ``error`` belongs to; ``"other"`` if that is none."""
    ours = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__ and kind.__name__ in __all__)
    return next(ours, "other")


def name_of(error: BaseException) -> str:
    """Returns the name of the class of this module as which another process is told of ``error``: see :func:`named`."""
    found = class_of(error)
    if found != "other":
        return found
    return "SystemRefused" if isinstance(error, OSError) else "TensorferryError"


def named(name: str, text: str) -> TensorferryError:
    """Returns the error that another process has told by the name of its class."""
    kind = globals()[name] if name in __all__ else TensorferryError
    try:
        error: TensorferryError = kind(text)
    except TypeError:
        error = TensorferryError(f"{name}: {text}")
    return error


def message_of(error: BaseException) -> str:
    """Returns the message of an error, without what the classes of ``urllib`` write around it."""
    return str(error.reason if isinstance(error, URLError) else error)
