"""The transports that are compared, by name.

`torchft:4` is torchft's with four chunks. `tensorferry` is ours as it is imported, `tensorferry+inplace` receives into
the trainer's own tensors, and with `+samehost` bytes go through a Unix-domain socket.
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
    same_host: bool

    @classmethod
    def parse(cls, name: str) -> Contender:
        """Read `library[:chunks][+samehost][+inplace]`; raise ValueError for anything else."""
        transport, *options = name.split("+")
        library, _, chunks = transport.partition(":")
        if library not in _MODULES or not {*options} <= {"samehost", "inplace"} or (options and library != OURS):
            raise ValueError(f"no such contender: {name!r}")
        return cls(name, library, int(chunks or 0), "inplace" in options, "samehost" in options)

    def open(self, timeout: timedelta, live: Callable[[], Any] | None = None) -> Any:
        """Build the transport; `live` returns the state to receive into, where this contender does that."""
        transport = importlib.import_module(_MODULES[self.library]).HTTPTransport
        options: dict[str, Any] = {"same_host": True} if self.same_host else {}
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
        names.append(OURS)
        if row.large:
            names += [f"{OURS}+inplace", f"{OURS}+samehost+inplace"]
    return [Contender.parse(name) for name in names]


def select(names: list[str], row: Row, have_ours: bool) -> list[Contender]:
    """Return the contenders asked for by name that make sense for this row."""
    chosen = [Contender.parse(name) for name in names]
    return [c for c in chosen if (have_ours or c.library != OURS) and (row.large or not c.in_place)]
