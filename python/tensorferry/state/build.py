"""Builds a state from the entries of a container."""

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
    """Builds a state from a manifest and from entries whose memory is known.

    Args:
        manifest: the state's manifest
        entries: the entries of the container
        plain: the numbers of those entries that are plain tensors, in ascending order

    Attributes:
        scattered: by number, the storages that no single entry fills; their memory is allocated here
    """

    def __init__(self, manifest: Manifest, entries: Remote | Rows, plain: Sequence[int]) -> None:
        self.manifest = manifest
        self.plain = plain
        self.size = entries.size
        self._entries = entries
        # Storages that were sent in part or in several pieces get memory of their own. It is zeroed, and only pages
        # that are written take memory: a view of a few bytes may have a storage of many gigabytes.
        scattered = {
            k: nbytes
            for k, (nbytes, pieces) in enumerate(manifest.storages)
            if not (len(pieces) == 1 and self.size(pieces[0][0]) == nbytes) and nbytes
        }
        memory = Arena(list(scattered.values())) if scattered else None
        self.scattered = {
            k: storage_over(memory.part(i), 0, nbytes) for i, (k, nbytes) in enumerate(scattered.items()) if memory
        }

    # These columns of Python objects are created on demand: with many small tensors they would dominate memory use.
    @cached_property
    def dtypes(self) -> list[str]:
        """The container's name for the dtype of each entry."""
        return self._entries.dtypes

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each entry."""
        return self._entries.shapes

    def scattered_entries(self) -> dict[int, int]:
        """Returns the address of each entry that is a piece of a scattered storage."""
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
        """Builds the state and returns it.

        Args:
            pickled: the pickle of everything that is not a plain tensor
            allowed: the globals that the pickle may name
            memory: returns the buffer of an entry and the offset in it
            targets: the receiver's own tensors, where it receives in place
            made: the plain tensors, ``None`` for those that do not exist yet; and the places of these in the list

        Raises:
            ProtocolError: pickle and manifest contradict each other, or a tensor cannot be built
            UnsafePickle: the pickle asks for something that is not allowed
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
            raise ProtocolError(f"the source announced {self.manifest.objects} objects but sent {len(objects)}")

        take = targets.take if targets is not None else None
        return tree.unflatten(self.manifest.tree, leaves, objects, take, allowed.defaultdict)

    def _leaves(
        self,
        memory: Callable[[int], tuple[Any, int]],
        targets: InPlaceTargets | None,
        made: list[torch.Tensor | None],
        missing: Sequence[int],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the tensors over the received memory, and the leaves for the state: these tensors or Parameters."""
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
                    raise ProtocolError(f"entry {i} of the source's state cannot be made a tensor: {e}") from e
        received = cast("list[torch.Tensor]", made)
        if not flags:
            return received, received
        leaves = received.copy()
        for number, flag in enumerate(flags):
            if flag != "0" and self.plain[number] not in direct:
                leaf = leaves[number]
                leaves[number] = leaf.requires_grad_() if flag == "2" else parameter(leaf, flag == "3")
        return received, leaves
