"""Fetches a state into fresh memory or into the receiver's own tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _gc
from .._native import Remote, Report
from ..errors import ProtocolError
from ..memory.bounce import BounceBuffers
from ..memory.tensors import DTYPES
from ..net.report import InPlace
from .allowlist import Allowed
from .build import StateBuilder
from .in_place import InPlaceTargets
from .manifest import Manifest


def receive(
    remote: Remote, allowed: Allowed, live: Callable[[], InPlaceTargets] | None, bounce: BounceBuffers
) -> tuple[Any, Report, InPlace | None]:
    """Fetches the checkpoint ``remote`` and builds the state.

    Args:
        remote: an opened checkpoint
        allowed: the globals that its pickle may name
        live: returns the receiver's own tensors to be filled in place; ``None`` receives into fresh memory
        bounce: the buffers through which bytes reach an accelerator

    Returns:
        The state, a report of the transfer, and how the live state matched, if there was one.

    Raises:
        ProtocolError: what the source serves is not a state, or contradicts itself
        StateMismatch: the state does not fit into the receiver's own tensors
        UnsafePickle: its pickle asks for something that is not allowed
        TensorferryError: the transfer failed
    """
    manifest, layout = remote.manifest, remote.tree
    if manifest is None or layout is None:
        raise ProtocolError(
            "the source does not serve the state of an HTTPTransport: load what a PeerWriter publishes with a "
            "PeerReader, and a file that tensorferry did not write with safetensors"
        )
    pickled = remote.pickle or b""
    for dtype, name in remote.kinds.items():
        if dtype not in DTYPES:
            raise ProtocolError(f"entry {name!r} has dtype {dtype}, which this version does not support")
    with _gc.gc_paused():
        builder = StateBuilder(Manifest(manifest, layout), remote, remote.plain)
        targets = live() if live is not None else None
        if targets is not None:
            targets.assign(builder, remote.names)
        addresses = builder.scattered_entries()
        if targets is not None:
            addresses |= targets.places
    places = [addresses.get(i) for i in range(len(remote))] if addresses else None
    if targets is not None and targets.staged:
        waves = remote.staged(places, list(targets.staged), bounce.size(targets.staged))
        bounce.bring(waves, targets.staged)
        arena, report = waves.finish()
    else:
        arena, report = remote.fetch(places)

    def memory(i: int) -> tuple[Any, int]:
        part = arena.part(i)
        if part is None:
            raise ProtocolError(f"the source's manifest uses the bytes of entry {remote.names[i]!r} twice")
        return part, 0

    with _gc.gc_paused():
        made = arena.tensors(torch.Tensor)
        state = builder.build(pickled, allowed, memory, targets, made)
        if targets is not None:
            targets.write()
    return state, report, None if targets is None else targets.fit
