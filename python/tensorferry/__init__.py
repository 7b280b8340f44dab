"""Streams live PyTorch training state between processes, zero-copy, over HTTP.

``from tensorferry import HTTPTransport`` replaces ``from torchft.checkpointing import HTTPTransport``. The public names
are imported on first use. The errors here are those that a program handles; ``tensorferry.errors`` has all of them.
"""

from typing import TYPE_CHECKING

from ._first_use import on_first_use

if TYPE_CHECKING:
    from .errors import (
        ConnectError,
        CorruptCheckpoint,
        FetchTimeout,
        IncompleteCheckpoint,
        SourceChanged,
        StateMismatch,
        TensorferryError,
        WrongStep,
    )
    from .frameworks.installing import install
    from .net.metadata import join_metadata
    from .net.network import Network
    from .net.report import ReceiveReport
    from .torchft.manager import Manager
    from .torchft.transport import HTTPTransport

__all__ = [
    "ConnectError",
    "CorruptCheckpoint",
    "FetchTimeout",
    "HTTPTransport",
    "IncompleteCheckpoint",
    "Manager",
    "Network",
    "ReceiveReport",
    "SourceChanged",
    "StateMismatch",
    "TensorferryError",
    "WrongStep",
    "install",
    "join_metadata",
]

__version__: str

if not TYPE_CHECKING:  # With a module __getattr__, a type checker would accept any name.
    _get, _ = on_first_use(
        __name__,
        dict.fromkeys(__all__, ".errors")
        | {
            "HTTPTransport": ".torchft.transport",
            "Manager": ".torchft.manager",
            "Network": ".net.network",
            "ReceiveReport": ".net.report",
            "install": ".frameworks.installing",
            "join_metadata": ".net.metadata",
        },
    )

    def __getattr__(name: str) -> object:
        if name == "errors":
            from importlib import import_module

            return import_module(".errors", __name__)
        if name == "__version__":
            from importlib.metadata import version

            return version(__name__)
        return _get(name)

    def __dir__() -> list[str]:
        return [*__all__, "__version__", "errors"]
