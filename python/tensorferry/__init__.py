"""Streams live PyTorch training state between processes, zero-copy, over HTTP.

``from tensorferry import HTTPTransport`` replaces ``from torchft.checkpointing import HTTPTransport``. The public names
are imported on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
        WriterLost,
        WrongStep,
    )
    from .frameworks.installing import install
    from .net.metadata import join_metadata
    from .net.report import ReceiveReport
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
    "ReceiveReport",
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
    "WriterLost",
    "WrongStep",
    "install",
    "join_metadata",
]

__version__: str

#: The module of each public name that is not an error class.
_MODULES = {
    "HTTPTransport": ".torchft.transport",
    "ReceiveReport": ".net.report",
    "install": ".frameworks.installing",
    "join_metadata": ".net.metadata",
}

if not TYPE_CHECKING:  # With a module __getattr__, a type checker would accept any name.

    def __getattr__(name: str) -> object:
        """Imports a public name on first use, so that ``import tensorferry`` loads neither torch nor ``_native``."""
        from importlib import import_module

        if name == "errors":
            return import_module(".errors", __name__)
        if name == "__version__":
            from importlib.metadata import version

            return version(__name__)
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES.get(name, ".errors"), __name__), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return [*__all__, "__version__", "errors"]
