"""Fetches a state into fresh memory or into the receiver's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from .. import _gc
from .._native import Remote, Report, Stored
from ..errors import ProtocolError, StateMismatch, TensorferryError, UnsafePickle
from ..memory.bounce import BounceBuffers
from ..memory.tensors import DTYPES
from ..net.report import InPlace
from ..net.tracing import Span
from ..pickles.allowlist import Allowed
from .build import Relocate, StandIns, StateBuilder
from .in_place import AT_SOURCE, IN_FILE, InPlaceTargets
from .manifest import Manifest
from .part import storages_of


def receive(
    remote: Remote | Stored,
    allowed: Allowed,
    live: Callable[[], InPlaceTargets | None] | None,
    bounce: BounceBuffers,
    relocate: Relocate | None = None,
) -> tuple[Any, Report, InPlace | None]:
    """Fetches the checkpoint ``remote`` and builds the state.

    Args:
        remote: an opened checkpoint
        allowed: the globals that its pickle may name
        live: returns the receiver's own tensors to be filled in place; ``None``, or from it, receives into fresh memory
        bounce: the buffers through which bytes reach an accelerator
        relocate: moves storages that are not the receiver's own to the device where they belong

    Returns:
        The state, a report of the transfer, and how the live state matched, if there was one.

    Raises:
        ProtocolError: what the source serves is not a state, or contradicts itself
        StateMismatch: the state does not fit into the receiver's own tensors
        UnsafePickle: its pickle asks for something that is not allowed
        TensorferryError: the transfer failed
    """
    with _gc.gc_paused():
        builder, pickled = begin(remote)
        targets = live() if live is not None else None
        if targets is not None:
            try:
                targets.assign(builder, remote.names, AT_SOURCE if isinstance(remote, Remote) else IN_FILE)
            except StateMismatch as e:
                targets.give_up(e)
                targets = None
    return _receive(remote, builder, pickled, allowed, targets, bounce, None, relocate)


def receive_part(
    stored: Stored,
    allowed: Allowed,
    target: Any,
    bounce: BounceBuffers,
    relocate: Relocate | None = None,
    strict: bool = False,
    kept: Collection[int] = (),
) -> tuple[Any, list[str]]:
    """Reads the part of a container's state that ``target`` has keys for (``part.py``) into the tensors of ``target``.

    Args:
        stored: an opened container, in a file or in memory
        allowed: the globals that its pickle may name
        target: the state, of which only the tensors are changed
        bounce: the buffers through which bytes reach an accelerator
        relocate: as for :func:`receive`
        strict: refuses a container that lacks paths of ``target``
        kept: the identities of values in ``target`` that are left as they are

    Returns:
        What there is of it, with the tensors of ``target``; and the paths that the container does not have.

    Raises:
        StateMismatch: the two differ in types, dtypes or shapes, or ``strict`` is set and paths are missing; nothing
            was overwritten then
        TensorferryError: as for :func:`receive`
    """
    targets = InPlaceTargets(target, bounce.accelerator, True, strict, is_part=True, kept=kept)
    # What is not asked for may be of any class.
    allowed = allowed.sparing()
    with _gc.gc_paused():
        builder, pickled = begin(stored)
        stand_ins = StandIns(builder)
        try:
            objects = builder.objects(pickled, allowed, stand_ins.among([]), stand_ins.storage)
        except TensorferryError:
            # Some objects cannot be built before the bytes of their tensors are fetched: sparse tensors check their
            # indices. What is really wrong with the pickle shows again.
            objects = None
        if objects is None:
            whole, _, _ = _receive(stored, builder, pickled, allowed, None, bounce, None, None)
            return targets.fill(whole, IN_FILE), targets.missing
        targets.assign(builder, stored.names, IN_FILE, objects)
        match = targets.match
        storages = set() if stand_ins.are_unused else storages_of([objects[number] for number in match.objects])
        stored.leave_out(stand_ins.want(match.leaves, storages))
        if not stand_ins.are_unused:
            objects = None
    state, _, _ = _receive(stored, builder, pickled, allowed, targets, bounce, stand_ins, relocate, objects)
    return state, targets.missing


def begin(remote: Remote | Stored) -> tuple[StateBuilder, bytes]:
    """Returns a builder for the state in an opened container, and the pickle of its objects.

    Raises:
        ProtocolError: what the container holds is not a state
        SystemRefused: as for :class:`StateBuilder`
    """
    manifest, layout = remote.manifest, remote.tree
    if manifest is None or layout is None:
        if isinstance(remote, Remote):
            raise ProtocolError(
                "the source does not serve a whole state: what a tensorferry.dcp.PeerWriter publishes is loaded with a "
                "tensorferry.dcp.PeerReader"
            )
        raise ProtocolError(
            f"{remote.path or 'the container'} does not hold a whole state: the folder of a distributed checkpoint is "
            "loaded with a tensorferry.dcp.FileReader, and a file of another program with safetensors"
        )
    for dtype, name in remote.kinds.items():
        if dtype not in DTYPES:
            raise ProtocolError(f"entry {name!r} has dtype {dtype}, which this version does not support")
    return StateBuilder(Manifest(manifest, layout), remote, remote.plain), remote.pickle or b""


def _receive(
    remote: Remote | Stored,
    builder: StateBuilder,
    pickled: bytes,
    allowed: Allowed,
    targets: InPlaceTargets | None,
    bounce: BounceBuffers,
    stand_ins: StandIns | None,
    relocate: Relocate | None,
    objects: list[Any] | None = None,
) -> tuple[Any, Report, InPlace | None]:
    """Fetches what the state of ``builder`` needs, and builds it."""
    with _gc.gc_paused():
        addresses = builder.scattered_entries()
        if targets is not None:
            addresses |= targets.places
    places = [addresses.get(i) for i in range(builder.count)] if addresses else None
    with Span("fetch") as span:
        if targets is not None and targets.staged:
            waves = remote.staged(places, list(targets.staged), bounce.size(targets.staged))
            bounce.bring(waves, targets.staged)
            arena, report = waves.finish()
        else:
            arena, report = remote.fetch(places)
        span.set(bytes=report.bytes, lanes=report.lanes, retries=report.retries, same_host=report.same_host)
        if isinstance(remote, Remote):
            span.last("verify", report.verifying_seconds)

    def memory(i: int) -> tuple[Any, int]:
        part = arena.part(i)
        if part is None:
            raise ProtocolError(f"the source's manifest uses the bytes of entry {remote.names[i]!r} twice")
        return part, 0

    with _gc.gc_paused(), Span("build"):
        made = arena.tensors(torch.Tensor)
        try:
            state = builder.build(pickled, allowed, memory, targets, made, stand_ins, relocate, objects)
        except UnsafePickle as e:
            if isinstance(remote, Remote) or remote.path is None:
                raise
            raise UnsafePickle(f"{remote.path}: {e}") from e
        if targets is not None:
            targets.write()
    return state, report, None if targets is None else targets.fit
