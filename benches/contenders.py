"""The transports that are compared, by name.

`torchft:4` is torchft's with four chunks. `tensorferry` is ours as it is imported, `tensorferry+inplace` receives into
the trainer's own tensors, and with `+network` bytes go through sockets, as they do between machines.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from states import Row

OURS = "tensorferry"
THEIRS = "torchft"
_MODULES = {OURS: "tensorferry", THEIRS: "torchft.checkpointing.http_transport"}


@dataclass(frozen=True)
class Contender:
    """A transport class and how it is built."""

    name: str
    library: str
    chunks: int
    in_place: bool
    network: bool

    @classmethod
    def parse(cls, name: str) -> Contender:
        """Read `library[:chunks][+network][+inplace]`; raise ValueError for anything else."""
        transport, *options = name.split("+")
        library, _, chunks = transport.partition(":")
        if library not in _MODULES or not {*options} <= {"network", "inplace"} or (options and library != OURS):
            raise ValueError(f"no such contender: {name!r}")
        return cls(name, library, int(chunks or 0), "inplace" in options, "network" in options)

    def open(self, timeout: timedelta, live: Callable[[], Any] | None = None) -> Any:
        """Build the transport; `live` returns the state to receive into, where this contender does that."""
        transport = importlib.import_module(_MODULES[self.library]).HTTPTransport
        options: dict[str, Any] = {"same_host": False} if self.network else {}
        if self.in_place and live is not None:
            options["state_dict"] = live
        return transport(timeout, self.chunks, **options)


def version(library: str) -> str | None:
    """Return a library's version, or None where its transport cannot be used here."""
    try:
        importlib.import_module(_MODULES[library]).HTTPTransport  # noqa: B018
    except (ImportError, AttributeError):
        return None
    return importlib.metadata.version(library)


def choose(row: Row, have_ours: bool, *, quick: bool) -> list[Contender]:
    """Return the contenders of a row in their default order."""
    names = [f"{THEIRS}:{chunks}" for chunks in (row.chunks[:2] if quick else row.chunks)]
    if have_ours:
        names += [OURS, f"{OURS}+network"]
        if row.large:
            names += [f"{OURS}+inplace", f"{OURS}+network+inplace"]
    return [Contender.parse(name) for name in names]


def select(names: list[str], row: Row, have_ours: bool) -> list[Contender]:
    """Return the contenders asked for by name that make sense for this row."""
    chosen = [Contender.parse(name) for name in names]
    return [c for c in chosen if (have_ours or c.library != OURS) and (row.large or not c.in_place)]
