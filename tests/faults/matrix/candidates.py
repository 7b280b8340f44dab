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
        encrypts: whether its connections are encrypted; faults that read them are left out then
        local: whether processes on one machine can do without the network; the factory then also takes ``same_host``
            and ``max_bandwidth`` (bytes per second)
        in_place: whether a receiver can write into its live state; the factory then also takes ``state_dict``
        stock: whether it also receives from torchft's own transport
        rails: whether a source can name several addresses; the factory then also takes ``advertise``
    """

    name: str
    factory: str
    lanes: int = 4
    join: str = ""
    encrypts: bool = False
    local: bool = False
    in_place: bool = False
    stock: bool = False
    rails: bool = False

    def build(self, timeout: float, **more: Any) -> Any:
        """Builds a transport.

        Args:
            timeout: of the transport, seconds
            more: options that only some candidates take: ``same_host``, ``max_bandwidth``, ``state_dict``,
                ``advertise``
        """
        return _load(self.factory)(timedelta(seconds=timeout), self.lanes, **more)

    def joined(self, metadata: list[str]) -> str:
        """Joins the metadata of several sources into one string."""
        return str(_load(self.join)(metadata))


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _tensorferry(timeout: timedelta, lanes: int, **more: Any) -> Any:
    from tensorferry import HTTPTransport

    return HTTPTransport(timeout, lanes, **more)


def _tensorferry_copy(timeout: timedelta, lanes: int, **more: Any) -> Any:
    return _tensorferry(timeout, lanes, snapshot="copy", **more)


def _tensorferry_secret(timeout: timedelta, lanes: int, **more: Any) -> Any:
    return _tensorferry(timeout, lanes, secret="shared by the processes of a cell", **more)


def _tensorferry_tls(timeout: timedelta, lanes: int, **more: Any) -> Any:
    return _tensorferry(timeout, lanes, tls=True, **more)


def _torchft(timeout: timedelta, lanes: int) -> Any:
    from torchft.checkpointing import HTTPTransport

    return HTTPTransport(timeout, lanes)


_JOIN = "tensorferry:join_metadata"

BUILTIN = {
    candidate.name: candidate
    for candidate in (
        Candidate(
            "tensorferry", f"{__name__}:_tensorferry", join=_JOIN, local=True, in_place=True, stock=True, rails=True
        ),
        Candidate(
            "tensorferry-copy", f"{__name__}:_tensorferry_copy", join=_JOIN, local=True, in_place=True, stock=True
        ),
        Candidate("tensorferry-secret", f"{__name__}:_tensorferry_secret", join=_JOIN, local=True, in_place=True),
        Candidate(
            "tensorferry-tls",
            f"{__name__}:_tensorferry_tls",
            join=_JOIN,
            encrypts=True,
            local=True,
            in_place=True,
            rails=True,
        ),
        Candidate("torchft", f"{__name__}:_torchft"),
        Candidate("torchft-unchunked", f"{__name__}:_torchft", lanes=0),
    )
}
"""The candidates that are chosen by name."""
