"""A state made of the entries of a container."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch

from .._native import Arena, Remote, Rows
from ..errors import ProtocolError
from ..memory.tensors import DTYPES, over, parameter, storage_over
from . import pickling, tree
from .allowlist import Allowed
from .in_place import InPlaceTargets
from .manifest import Manifest


class StateBuilder:
    """Builds a state from entries whose memory is known."""

    def __init__(self, manifest: Manifest, entries: Remote | Rows, plain: Sequence[int]) -> None:
        """For the ``entries`` of a container, of which those with the numbers ``plain`` are plain tensors."""
        self.manifest = manifest
        self.plain = plain
        self.size = entries.size
        self._entries = entries
        # Storages of which not every byte was sent, or that lie in several pieces: memory of their own, zero, of which
        # only the pages that bytes come to are ever there. A view of a few bytes may look into many gigabytes.
        scattered = {
            k: nbytes
            for k, (nbytes, pieces) in enumerate(manifest.storages)
            if not (len(pieces) == 1 and self.size(pieces[0][0]) == nbytes) and nbytes
        }
        memory = Arena(list(scattered.values())) if scattered else None
        self.scattered = {
            k: storage_over(memory.part(i), 0, nbytes) for i, (k, nbytes) in enumerate(scattered.items()) if memory
        }

    # Columns of Python objects are made only where somebody asks: with many small tensors they are what takes memory.
    @cached_property
    def dtypes(self) -> list[str]:
        """What the container calls each entry's dtype."""
        return self._entries.dtypes

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each entry."""
        return self._entries.shapes

    def scattered_entries(self) -> dict[int, int]:
        """Entry to address, for the pieces of scattered storages."""
        return {
            entry: self.scattered[k].data_ptr() + lo
            for k in self.scattered
            for entry, lo in self.manifest.storages[k][1]
            if self.size(entry)
        }

    def build(
        self,
        pickled: bytes,
        allowed: Allowed,
        memory: Callable[[int], tuple[Any, int]],
        targets: InPlaceTargets | None = None,
        made: tuple[list[torch.Tensor | None], Sequence[int]] | None = None,
    ) -> Any:
        """The state.

        Args:
            pickled: everything that is no plain tensor
            allowed: which globals it may name
            memory: gives the buffer and offset of an entry
            targets: filled in place
            made: the plain tensors that exist already, and the places of those that do not
        """
        received, leaves = self._leaves(memory, targets, *(made or ([None] * len(self.plain), range(len(self.plain)))))
        rows = self.manifest.storages
        storages = self.scattered.copy()

        def storage(k: int) -> torch.UntypedStorage:
            if k not in storages:
                if not 0 <= k < len(rows):
                    raise ProtocolError(f"the source's pickle refers to storage {k}, which does not exist")
                nbytes, pieces = rows[k]
                if nbytes == 0:
                    storages[k] = torch.UntypedStorage(0)
                else:
                    entry = pieces[0][0]
                    number = bisect_left(self.plain, entry)
                    if number < len(self.plain) and self.plain[number] == entry:
                        storages[k] = received[number].untyped_storage()
                    else:
                        storages[k] = storage_over(*memory(entry), nbytes)
            return storages[k]

        objects = pickling.load(pickled, allowed, leaves, storage, self.manifest.needs) if pickled else []
        if len(objects) != self.manifest.objects:
            raise ProtocolError(f"the source announced {self.manifest.objects} objects and sent {len(objects)}")

        take = targets.take if targets is not None else None
        return tree.unflatten(self.manifest.tree, leaves, objects, take, allowed.defaultdict)

    def _leaves(
        self,
        memory: Callable[[int], tuple[Any, int]],
        targets: InPlaceTargets | None,
        made: list[torch.Tensor | None],
        missing: Sequence[int],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors over the received memory, and those that stand in the state: Parameters over the same."""
        flags = self.manifest.flags
        direct = targets.direct if targets is not None else {}
        for number in missing:
            i = self.plain[number]
            if i in direct:
                made[number] = direct[i]
            else:
                size = self.size(i)
                buffer, offset = memory(i) if size else (None, 0)
                try:
                    made[number] = over(buffer, offset, DTYPES[self.dtypes[i]], self.shapes[i], size)
                except (RuntimeError, OverflowError, TypeError, ValueError) as e:
                    raise ProtocolError(f"no tensor can be made of entry {i} of the source's state: {e}") from e
        received = cast("list[torch.Tensor]", made)
        if not flags:
            return received, received
        leaves = received.copy()
        for number, flag in enumerate(flags):
            if flag != "0" and self.plain[number] not in direct:
                leaf = leaves[number]
                leaves[number] = leaf.requires_grad_() if flag == "2" else parameter(leaf, flag == "3")
        return received, leaves
