"""The transports that are compared, by name.

`torchft:4` is torchft's HTTPTransport with four chunks, `gloo` its PGTransport over a gloo process group. `tensorferry`
is ours as it is imported. With `+inplace` a transport receives into the trainer's own tensors, with `+manager` as our
Manager asks for it, and with `+network` our bytes go through sockets, as they do between machines; torchft's always do.
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
GLOO = "gloo"
#: What a process imports before it makes a transport of each library.
MODULES = {
    OURS: "tensorferry",
    THEIRS: "torchft.checkpointing.http_transport",
    GLOO: "torchft.checkpointing.pg_transport",
}
_OPTIONS = {OURS: {"network", "inplace", "manager"}, THEIRS: set(), GLOO: {"inplace"}}


class StateRefused(Exception):
    """A transport cannot send this state at all."""


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
        if library not in MODULES or not {*options} <= _OPTIONS[library] or (chunks and library == GLOO):
            raise ValueError(f"no such contender: {name!r}")
        in_place = not {"inplace", "manager"}.isdisjoint(options)
        return cls(name, library, int(chunks or 0), in_place, "network" in options)

    @property
    def meets(self) -> bool:
        """Whether each receive needs a send of its own, at the same time."""
        return self.library == GLOO

    def open(self, timeout: timedelta, live: Callable[[], Any]) -> Any:
        """Build the transport; `live` returns the state to receive into, where this contender does that."""
        if self.library == GLOO:
            from gloo_pair import GlooPair  # imports torch.distributed, which no other contender should wait for

            return GlooPair(timeout, live if self.in_place else None)
        module = importlib.import_module(MODULES[self.library])
        options: dict[str, Any] = {"network": module.Network(same_host=False)} if self.network else {}
        if self.in_place and "+manager" not in self.name:
            options["state_dict"] = live
        transport = module.HTTPTransport(timeout, self.chunks, **options)
        if "+manager" in self.name:
            transport.receive_into(live)
        return transport


def version(library: str) -> str | None:
    """Return a library's version, or None where its transport cannot be used here."""
    try:
        importlib.import_module(MODULES[library]).HTTPTransport  # noqa: B018
    except (ImportError, AttributeError):
        return None
    return importlib.metadata.version(library)


def choose(row: Row, have_ours: bool, *, full: bool) -> list[Contender]:
    """Return the contenders of a row in their default order."""
    chunks = (0, 2, 4, 8) if full and row.floor else (0, 2, 4)
    names = [*(f"{THEIRS}:{count}" for count in chunks), GLOO]
    names += [f"{GLOO}+inplace"] if row.in_place else []
    if have_ours:
        names += [OURS, f"{OURS}+network"]
        names += [f"{OURS}+inplace", f"{OURS}+network+inplace", f"{OURS}+manager"] if row.in_place else []
    return [Contender.parse(name) for name in names]


def select(names: list[str], row: Row, have_ours: bool) -> list[Contender]:
    """Return the contenders asked for by name that make sense for this row."""
    chosen = [Contender.parse(name) for name in names]
    return [c for c in chosen if (have_ours or c.library != OURS) and (row.in_place or not c.in_place)]
