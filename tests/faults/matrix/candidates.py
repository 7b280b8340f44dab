"""The transports that the matrix tests: how each is built in a process, and what it can do."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """A transport under test.

    Args:
        name: its name in the table
        factory: ``module:callable``; called as ``factory(timeout, lanes)`` in each process, it returns a
            ``CheckpointTransport`` whose ``metadata()`` is a URL
        lanes: number of connections of a receive, or the nearest setting the transport has
        join: ``module:callable`` that joins the metadata of several sources into one string; empty if a receive can
            have only one source
    """

    name: str
    factory: str
    lanes: int = 4
    join: str = ""

    def build(self, timeout: float) -> Any:
        """Builds a transport with a timeout in seconds."""
        return _load(self.factory)(timedelta(seconds=timeout), self.lanes)

    def joined(self, metadata: list[str]) -> str:
        """Joins the metadata of several sources into one string."""
        return str(_load(self.join)(metadata))


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _tensorferry(timeout: timedelta, lanes: int, **more: Any) -> Any:
    from tensorferry import HTTPTransport

    return HTTPTransport(timeout, lanes, **more)


def _tensorferry_copy(timeout: timedelta, lanes: int) -> Any:
    return _tensorferry(timeout, lanes, snapshot="copy")


def _tensorferry_secret(timeout: timedelta, lanes: int) -> Any:
    return _tensorferry(timeout, lanes, secret="shared by the processes of a cell")


def _tensorferry_tls(timeout: timedelta, lanes: int) -> Any:
    return _tensorferry(timeout, lanes, tls=True)


def _torchft(timeout: timedelta, lanes: int) -> Any:
    from torchft.checkpointing import HTTPTransport

    return HTTPTransport(timeout, lanes)


_OURS = ("tensorferry", "tensorferry-copy", "tensorferry-secret", "tensorferry-tls")

BUILTIN = {
    **{
        name: Candidate(name, f"{__name__}:_{name.replace('-', '_')}", join="tensorferry:join_metadata")
        for name in _OURS
    },
    "torchft": Candidate("torchft", f"{__name__}:_torchft"),
    "torchft-unchunked": Candidate("torchft-unchunked", f"{__name__}:_torchft", lanes=0),
}
"""The candidates that are chosen by name."""
