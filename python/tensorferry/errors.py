"""What can go wrong, grouped by what a user can do about it.

Every class is a :class:`TensorferryError` and also the builtin or ``urllib`` class that callers of torchft's
``HTTPTransport`` already catch.
"""

from __future__ import annotations

import pickle
from email.message import Message
from urllib.error import HTTPError, URLError

__all__ = [
    "ConnectError",
    "CorruptCheckpoint",
    "FetchTimeout",
    "ForkedProcess",
    "IncompleteCheckpoint",
    "InvalidArgument",
    "ProtocolError",
    "SourceChanged",
    "SourceRefused",
    "StateMismatch",
    "SystemRefused",
    "TensorferryError",
    "TornCheckpoint",
    "TransferCancelled",
    "TransportClosed",
    "UnprovenSource",
    "UnsafePickle",
    "UnsupportedLeaf",
    "WrongStep",
]


class TensorferryError(Exception):
    """Anything tensorferry raises on its own account."""


class FetchTimeout(TensorferryError, URLError, TimeoutError):
    """The deadline of a receive passed, or the source sent nothing for too long."""


class ConnectError(TensorferryError, URLError, ConnectionError):
    """No source could be reached, or every source went away."""


class SourceRefused(TensorferryError, HTTPError):
    """The source answered with an HTTP error; ``code`` is its status."""

    @staticmethod
    def of(code: int, message: str) -> SourceRefused:
        """The error for an answer with this status and message."""
        wrong_step = code == 400 and "invalid checkpoint requested" in message
        return (WrongStep if wrong_step else SourceRefused)("", code, message, Message(), None)


class WrongStep(SourceRefused):
    """The source serves another step than the one asked for."""


class SourceChanged(TensorferryError, RuntimeError):
    """The source went on to another snapshot while this one was being fetched."""


class ProtocolError(TensorferryError, ValueError):
    """What the source sent is not valid."""


class CorruptCheckpoint(TensorferryError, ValueError):
    """Bytes did not match their checksum, also when they were fetched again."""


class TornCheckpoint(CorruptCheckpoint):
    """The source changed its state while it was served, and no moment could be found at which all that came was true.

    The source has to call ``disallow_checkpoint()`` before it changes the state, or to serve a private copy:
    ``snapshot="copy"``.
    """


class StateMismatch(TensorferryError, ValueError):
    """The receiver's own tensors cannot take what the source has.

    They differ in shape, dtype or kind (dense or sparse, say), cannot be written to, share memory that the source's do
    not share, or were given other memory while bytes came; or, with ``strict=True``, one side has tensors that the
    other one lacks.
    """


class UnprovenSource(TensorferryError, URLError, PermissionError):
    """The source cannot prove who it is: it does not know the shared secret, or shows another certificate."""


class UnsupportedLeaf(TensorferryError, TypeError):
    """A leaf of the state cannot be carried; the message names its path."""


class UnsafePickle(TensorferryError, pickle.UnpicklingError):
    """The source's pickle asks for something that is not on the allow-list."""


class ForkedProcess(TensorferryError, RuntimeError):
    """A transport was used in a process forked from the one that made it."""


class TransportClosed(TensorferryError, RuntimeError):
    """A transport or writer was used after its ``shutdown``."""


class IncompleteCheckpoint(TensorferryError, FileNotFoundError):
    """There is no checkpoint here, or only what an interrupted save has left."""


class InvalidArgument(TensorferryError, ValueError):
    """An argument cannot be used."""


class SystemRefused(TensorferryError, OSError):
    """The operating system refused memory, a socket or a thread."""


class TransferCancelled(TensorferryError, RuntimeError):
    """The transfer was cancelled."""
