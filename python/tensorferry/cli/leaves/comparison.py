"""Comparing two checkpoints, by digests where they suffice."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...errors import InvalidArgument
from ...storage.reserved import PICKLE
from ..flags import Receiving, Trust
from ..places import CheckpointKind, Place, find
from .leaf import Leaf, Listing, by_path
from .listing import listings


class _Side:
    """One of the two, with its listings, and its values once they are needed."""

    def __init__(self, text: str, step: int | None, receiving: Receiving, trust: Trust) -> None:
        self._text, self._step, self._receiving, self._trust = text, step, receiving, trust
        self.place = find(text)
        # What torch has written in several files has no digests: its bytes are read.
        digests = self.place.layout is not CheckpointKind.TORCH_DISTRIBUTED
        self.listings = listings([text], step, receiving, trust, digests=digests)
        self._values: dict[int, dict[str, Any]] = {}
        #: Holds the copy of a checkpoint in a store, once its values are needed.
        self.copied = contextlib.ExitStack()
        self._here: Place | None = None
        #: The state of all ranks, once they were put together.
        self._whole: Any = None

    @property
    def _path(self) -> Path:
        """The checkpoint's file or folder; that of a copy, if it is in a store."""
        if self._here is None:
            from ..copying import local

            self._here = self.copied.enter_context(local(self.place))
        return self._here.path  # type: ignore[no-any-return]  # a copy has one

    def values(self, number: int) -> dict[str, Any]:
        """Returns the leaves of the container of this number, by their paths."""
        if number not in self._values:
            from .torch_leaves import values_of
            from .values import without_groups

            with without_groups():
                self._values[number] = values_of(self._state(number))
        return self._values[number]

    @property
    def is_distributed(self) -> bool:
        """Whether an index lists the leaves, as ``torch.distributed.checkpoint`` cuts a state into them."""
        return self.place.layout in (CheckpointKind.DISTRIBUTED, CheckpointKind.TORCH_DISTRIBUTED)

    def list_as_state(self) -> None:
        """Lists the leaves of a distributed checkpoint as those of a state, which may be others; digests stay."""
        from .torch_leaves import leaves_of

        name, listing = self.listings[0]
        known = {leaf.path: leaf for leaf in listing.leaves if leaf.digest is not None and leaf.kind == "tensor"}
        leaves = [known.get(leaf.path, leaf) for leaf in leaves_of(self._state(0), digests=False)]
        self.listings = [(name, Listing(listing.about, leaves))]

    def parts(self) -> list[list[tuple[str, str]]]:
        """Returns for each rank which part it has of the tensors that are spread over ranks."""
        return [[(leaf.path, leaf.part) for leaf in listing.leaves if leaf.part] for _, listing in self.listings]

    def put_together(self) -> None:
        """Replaces the listings of all ranks by one of the whole state, with whole tensors in place of their parts.

        All values are read for it. Of what several ranks have besides, the first rank's is taken. A single listing
        stays, unless it is that of a checkpointer's folder and has parts.
        """
        if len(self.listings) == 1 and not (self.place.kind is CheckpointKind.CHECKPOINT and any(self.parts())):
            return
        from .torch_leaves import leaves_of

        (name, first), *_ = self.listings
        self._whole = self._state_of_all_ranks()
        self._values.clear()
        self.listings = [(name, Listing(first.about, leaves_of(self._whole, digests=True)))]

    def _state_of_all_ranks(self) -> Any:
        """Returns the state of a checkpoint of several ranks, with whole tensors."""
        if self.place.kind is CheckpointKind.CHECKPOINT:
            from ...checkpointing import loading
            from .values import without_groups

            with without_groups():
                return loading.read(self._path, rank=0, world_size=1)[0]
        from ...dcp import PeerReader
        from ..mapped_states import state_of_distributed

        reader = PeerReader(
            self._text,
            timeout=timedelta(seconds=self._receiving.timeout),
            lanes=self._receiving.checked_lanes(),
            secret=self._trust.given_secret(),
            same_host=self._trust.same_host,
        )
        return state_of_distributed(reader)

    def _state(self, number: int) -> Any:
        """Returns the state in the container of this number."""
        from .. import mapped_states

        path = self.place.path if self.place.kind is CheckpointKind.PEERS else self._path
        match self.place.layout:
            case _ if self._whole is not None:
                return self._whole
            case CheckpointKind.PEERS:
                return self._of_peer(number)
            case CheckpointKind.CONTAINER:
                return mapped_states.state_of_container(path)
            case CheckpointKind.ARCHIVE:
                return mapped_states.state_of_archive(path)
            case CheckpointKind.SHARDS:
                return mapped_states.state_of_shards(path)
            case CheckpointKind.CHECKPOINT:
                return mapped_states.state_of_container(path / self.listings[number][0].rpartition("/")[2])
            case _:
                return mapped_states.state_of_distributed(path)

    def _of_peer(self, number: int) -> Any:
        """Fetches the state that a peer serves.

        Raises:
            InvalidArgument: it is a publication of several ranks
            TensorferryError: as for ``HTTPTransport.recv_checkpoint``
        """
        from ...memory.accelerator import ACCELERATOR
        from ...memory.bounce import BounceBuffers
        from ...pickles.allowlist import Allowed
        from ...pickles.deadline import Deadline
        from ...state.load import receive
        from ..sources import Peers, open_source

        found = Peers.of([self._text], self._trust)
        if found.are_ranks:
            raise InvalidArgument(
                "leaves of a running distributed checkpoint differ in ways that its digests do not show: pull it into "
                "a folder, and compare that"
            )
        step = self.listings[number][1].about["step"]
        allowed = Allowed().until(Deadline(self._receiving.timeout))
        remote, _ = open_source(found.urls, step, self._trust, self._receiving)
        with contextlib.closing(remote):
            return receive(remote, allowed, None, BounceBuffers(ACCELERATOR))[0]


class Comparison:
    """Compares two checkpoints.

    Args:
        a: one of them, as the command line names it
        b: the other
        step: of peers, the step
        receiving: the deadline and the connections, for peers
        trust: what peers have to prove
    """

    def __init__(self, a: str, b: str, step: int | None, receiving: Receiving, trust: Trust) -> None:
        self._a, self._b = (_Side(text, step, receiving, trust) for text in (a, b))
        self._differences: list[dict[str, str]] = []
        self._by_digest = self._by_bytes = 0

    def close(self) -> None:
        """Removes the copies of checkpoints in stores."""
        self._a.copied.close()
        self._b.copied.close()

    def run(self) -> dict[str, Any]:
        """Returns the differences, and how leaves were compared.

        Raises:
            TensorferryError: one of them cannot be read
        """
        if self._a.is_distributed != self._b.is_distributed:
            (self._a if self._a.is_distributed else self._b).list_as_state()
        if len(self._a.listings) != len(self._b.listings) or self._a.parts() != self._b.parts():
            self._a.put_together()
            self._b.put_together()
        ones, others = self._a.listings, self._b.listings
        for number, ((_, one), (_, other)) in enumerate(zip(ones, others, strict=True)):
            self._compare(number, one, other, f"rank {number}: " if len(ones) > 1 else "")
        return {
            "same": not self._differences,
            "differences": self._differences,
            "by_digest": self._by_digest,
            "by_bytes": self._by_bytes,
        }

    def _compare(self, number: int, one: Listing, other: Listing, prefix: str) -> None:
        """Compares two listings leaf by leaf, by digests and else by values, and notes the differences."""
        first, second = by_path(one.leaves), by_path(other.leaves)
        # Views and objects are the same if the memory behind them and their pickle are.
        same_tree = one.tree == other.tree
        hidden = bool(one.hidden) and one.hidden == other.hidden and same_tree
        pickles = one.hidden.get(PICKLE), other.hidden.get(PICKLE)
        same_objects = same_tree and pickles[0] is not None and pickles[0] == pickles[1]
        for path in [*first, *(path for path in second if path not in first)]:
            if path not in second or path not in first:
                self._note(prefix + path, f"only in the {'first' if path in first else 'second'}")
                continue
            a, b = first[path], second[path]
            if a.kind == b.kind == "alias" and a.notes == b.notes:
                continue
            if (how := _unlike(a, b)) is not None:
                self._note(prefix + path, how)
            elif a.digest is not None and a.digest == b.digest and (not a.part or same_objects):
                self._by_digest += 1
            elif None not in (a.digest, b.digest) and a.digest != b.digest and _is_plain(a) and _is_plain(b):
                self._by_digest += 1
                self._note(prefix + path, "the bytes differ")
            elif a.digest is None and b.digest is None and hidden:
                self._by_digest += 1
            else:
                self._by_bytes += 1
                self._compare_values(number, path, prefix)

    def _compare_values(self, number: int, path: str, prefix: str) -> None:
        from .values import are_same

        if not are_same(self._a.values(number).get(path), self._b.values(number).get(path)):
            self._note(prefix + path, "the values differ")

    def _note(self, path: str, how: str) -> None:
        self._differences.append({"path": path, "how": how})


def _is_plain(leaf: Leaf) -> bool:
    """Whether its digest is that of its bytes in order, and not of how they are cut into shards."""
    return leaf.kind == "tensor" or bool(leaf.part)


def _unlike(a: Leaf, b: Leaf) -> str | None:
    """Returns how two leaves differ in kind, dtype or shape; ``None`` if they do not."""
    if bool(a.dtype) != bool(b.dtype) and "alias" not in (a.kind, b.kind):
        return f"{a.dtype or a.kind} here, {b.dtype or b.kind} there"
    if a.dtype and b.dtype and (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    return None
