"""``tensorferry diff``: which leaves of two checkpoints or running peers differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import InvalidArgument
from .. import console, exits, peers
from ..copying import local
from ..listing import Leaf, Listing, by_path, listings
from ..places import CheckpointKind, Place, find, settled


def diff(
    a: str,
    b: str,
    /,
    *,
    step: int | None = None,
    timeout: float = peers.TIMEOUT,
    json: bool = False,
) -> int:
    """Shows which leaves of two checkpoints differ.

    Compares digests first, and reads the bytes only of leaves that have none or are stored in different shards. Exits
    with 0 if all leaves are equal, with 1 if some differ, and with 2 or more after an error.

    Args:
        a: a file, a folder, the URL of one in an object store, or the metadata of a running peer
        b: another one
        step: the step to ask a peer for (default: the one that is served)
        timeout: seconds for a receive from a peer
        json: print one JSON document
    """
    peers.refuse_without_peers([a, b], step, timeout)

    # Values are read after the listings: both must be of one save.
    def compared() -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            return _Comparison(_Side(a, step, timeout, stack), _Side(b, step, timeout, stack)).run()

    found = settled(compared, a, b, still=True)
    if json:
        console.out_json(found)
    else:
        for one in found["differences"]:
            console.out(f"{one['path']}: {one['how']}")
        counts = f"{found['by_digest']} leaves compared by digest, {found['by_bytes']} by their bytes"
        console.note("the same: " + counts if found["same"] else f"{len(found['differences'])} leaves differ; {counts}")
    return exits.OK if found["same"] else exits.NO


class _Side:
    """One of the two, with its listings, and its values once they are needed.

    Args:
        text: as the command line names it
        step: of a peer, the step
        timeout: of a receive from a peer, in seconds
        stack: removes the copy of a checkpoint in a store
    """

    def __init__(self, text: str, step: int | None, timeout: float, stack: contextlib.ExitStack) -> None:
        self._text, self._timeout, self._stack = text, timeout, stack
        self._place = find(text)
        layout = self._place.layout
        #: Whether an index lists the leaves, as ``torch.distributed.checkpoint`` cuts a state into them.
        self.is_distributed = layout in (CheckpointKind.DISTRIBUTED, CheckpointKind.TORCH_DISTRIBUTED)
        # What torch has written in several files has no digests: its bytes are read.
        self.listings = listings([text], step, timeout, digests=layout is not CheckpointKind.TORCH_DISTRIBUTED)
        self._values: dict[int, dict[str, Any]] = {}
        self._here: Place | None = None
        #: The state of all ranks, once they were put together.
        self._whole: Any = None
        if layout is CheckpointKind.PEERS and len(self.listings) > 1:
            raise InvalidArgument(f"{text.split()[0]} names several ranks: pull them into a folder, and compare that")

    def values(self, number: int) -> dict[str, Any]:
        """Returns the leaves of the container of this number, by their paths."""
        if number not in self._values:
            from ..torch_leaves import values_of
            from ..values import without_groups

            with without_groups():
                self._values[number] = values_of(self._state(number))
        return self._values[number]

    def put_together(self) -> None:
        """Replaces the listings by one of the whole state, which is read for it; digests of whole tensors stay.

        An index of a distributed checkpoint may cut a state into other leaves. Of what several ranks have besides, the
        first rank's is taken.
        """
        from ...checkpointing import loading
        from ..torch_leaves import leaves_of
        from ..values import without_groups

        is_checkpoint = self._place.kind is CheckpointKind.CHECKPOINT
        if not self.is_distributed and not (is_checkpoint and (len(self.listings) > 1 or any(self.parts()))):
            return
        with without_groups():
            self._whole = loading.read(self._copy().path, rank=0, world_size=1)[0] if is_checkpoint else self._state(0)
        (name, first), *_ = self.listings
        known = {
            leaf.path: leaf for leaf in first.leaves if leaf.digest and leaf.kind == "tensor" and not is_checkpoint
        }
        leaves = [known.get(leaf.path, leaf) for leaf in leaves_of(self._whole, digests=is_checkpoint)]
        self.listings = [(name, Listing(first.about, leaves))]

    def parts(self) -> list[list[tuple[str, str]]]:
        """Returns for each rank which part it has of the tensors that are spread over ranks."""
        return [[(leaf.path, leaf.part) for leaf in listing.leaves if leaf.part] for _, listing in self.listings]

    def _copy(self) -> Place:
        """Returns the checkpoint on this machine, copied out of a store if it is in one."""
        if self._here is None:
            self._here = self._stack.enter_context(local(self._place))
        return self._here

    def _state(self, number: int) -> Any:
        """Returns the state in the container of this number."""
        from .. import states

        if self._whole is not None:
            return self._whole
        if self._place.kind is CheckpointKind.PEERS:
            return self._of_peer()
        here = self._copy()
        if here.kind is CheckpointKind.CHECKPOINT:
            file: Path = here.path / self.listings[number][0].rpartition("/")[2]
            return states.state_of_container(file)
        return states.state_in(here)

    def _of_peer(self) -> Any:
        """Fetches the state that a peer serves; raises as ``HTTPTransport.recv_checkpoint``."""
        from ...memory.accelerator import ACCELERATOR
        from ...memory.bounce import BounceBuffers
        from ...pickles.allowlist import Allowed
        from ...pickles.deadline import Deadline
        from ...state.load import receive

        step = self.listings[0][1].about["step"]
        remote, _ = peers.open_source(peers.Peers.of([self._text]).urls, step, self._timeout)
        with contextlib.closing(remote):
            allowed = Allowed().until(Deadline(self._timeout))
            return receive(remote, allowed, None, BounceBuffers(ACCELERATOR))[0]


class _Comparison:
    """Compares two sides: by digests, where these suffice, and else by values."""

    def __init__(self, a: _Side, b: _Side) -> None:
        self._a, self._b = a, b
        self._differences: list[dict[str, str]] = []
        self._by_digest = self._by_bytes = 0

    def run(self) -> dict[str, Any]:
        """Returns the differences, and how leaves were compared.

        Raises:
            TensorferryError: one of them cannot be read
        """
        a, b = self._a, self._b
        if a.is_distributed or b.is_distributed:
            is_settled = a.is_distributed and b.is_distributed and _by_digests(a.listings[0][1], b.listings[0][1])
            for side in () if is_settled else (a, b):
                if side.is_distributed:
                    side.put_together()
        if len(a.listings) != len(b.listings) or a.parts() != b.parts():
            a.put_together()
            b.put_together()
        for number, ((_, one), (_, other)) in enumerate(zip(a.listings, b.listings, strict=True)):
            prefix = f"rank {number}: " if len(a.listings) > 1 else ""
            for path, how in self._compare(number, one, other):
                self._differences.append({"path": prefix + path, "how": how})
        return {
            "same": not self._differences,
            "differences": self._differences,
            "by_digest": self._by_digest,
            "by_bytes": self._by_bytes,
        }

    def _compare(self, number: int, one: Listing, other: Listing) -> Iterator[tuple[str, str]]:
        """Yields the paths of the leaves that differ, and how, of two listings."""
        first, second = by_path(one.leaves), by_path(other.leaves)
        # Views and objects are the same if the memory behind them and their pickle are.
        hidden = bool(one.hidden) and one.hidden == other.hidden and one.tree == other.tree
        for path in [*first, *(path for path in second if path not in first)]:
            if path not in second or path not in first:
                yield path, f"only in the {'first' if path in first else 'second'}"
                continue
            a, b = first[path], second[path]
            if a.kind == b.kind == "alias" and a.notes == b.notes:
                continue
            if (how := _unlike(a, b)) is not None:
                yield path, how
            elif (a.digest is not None and a.digest == b.digest) or (a.digest is b.digest is None and hidden):
                self._by_digest += 1
            elif None not in (a.digest, b.digest) and a.kind == b.kind == "tensor":
                self._by_digest += 1
                yield path, "the bytes differ"
            else:
                from ..values import are_same

                self._by_bytes += 1
                # What only one of them has is not the same.
                if not are_same(self._a.values(number).get(path, 0), self._b.values(number).get(path, "")):
                    yield path, "the values differ"


def _by_digests(one: Listing, other: Listing) -> bool:
    """Whether the digests of two listings say of each leaf whether it is the same."""
    first, second = by_path(one.leaves), by_path(other.leaves)
    return first.keys() == second.keys() and all(
        None not in (a.digest, b.digest) and (a.digest == b.digest or a.kind == b.kind == "tensor")
        for a, b in ((a, second[path]) for path, a in first.items())
    )


def _unlike(a: Leaf, b: Leaf) -> str | None:
    """Returns how two leaves differ in kind, dtype or shape; ``None`` if they do not."""
    if bool(a.dtype) != bool(b.dtype) and "alias" not in (a.kind, b.kind):
        return f"{a.dtype or a.kind} here, {b.dtype or b.kind} there"
    if a.dtype and b.dtype and (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    return None
