"""Streams live PyTorch training state between processes, zero-copy, over HTTP.

``from tensorferry import HTTPTransport`` takes the place of ``from torchft.checkpointing import HTTPTransport``.
"""

import atexit

from ._native import _shutdown_runtime
from .errors import (
    ConnectError,
    CorruptCheckpoint,
    FetchTimeout,
    ForkedProcess,
    IncompleteCheckpoint,
    InvalidArgument,
    ProtocolError,
    SourceChanged,
    SourceRefused,
    StateMismatch,
    SystemRefused,
    TensorferryError,
    TornCheckpoint,
    TransferCancelled,
    TransportClosed,
    UnprovenSource,
    UnsafePickle,
    UnsupportedLeaf,
    WrongStep,
)
from .net.metadata import join_metadata
from .torchft.transport import HTTPTransport

__all__ = [
    "ConnectError",
    "CorruptCheckpoint",
    "FetchTimeout",
    "ForkedProcess",
    "HTTPTransport",
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
    "join_metadata",
]

__version__ = "0.1.0"

atexit.register(_shutdown_runtime)
