"""The parts of tensors that are spread over ranks, as manifests and indexes describe them.

docs/reference/format.md has the fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..errors import ProtocolError
from ..storage.boxes import Box, checked_size, checked_sizes, why_not_whole


class Shard(NamedTuple):
    """A rank's part of a tensor.

    Attributes:
        rank: whose part it is
        offsets: where it begins in the whole tensor
        shape: its elements in each dimension
        stride: elements from one to the next in each dimension, in its storage
        storage: the number of that storage in the rank's manifest
        storage_offset: the elements before it in the storage
    """

    rank: int
    offsets: list[int]
    shape: list[int]
    stride: list[int]
    storage: Any
    storage_offset: int

    @property
    def box(self) -> Box:
        """Its elements in the whole tensor."""
        return Box(tuple(self.offsets), tuple(self.shape))

    def span(self, first: Sequence[int], lengths: Sequence[int], size: int) -> tuple[int, int]:
        """Returns the first byte in the storage of a box of elements, and how many bytes it reaches over.

        Args:
            first: where the box begins in the whole tensor
            lengths: its elements in each dimension
            size: bytes of an element
        """
        steps = zip(first, self.offsets, self.stride, strict=True)
        start = self.storage_offset + sum((a - o) * step for a, o, step in steps)
        reach = sum((n - 1) * step for n, step in zip(lengths, self.stride, strict=True)) + 1
        return start * size, reach * size


def described(where: object, path: str, fields: Any, own: int = 0) -> tuple[torch.dtype, list[int], list[Shard]]:
    """Returns dtype, global shape and parts of the tensor at ``path``, without replicas.

    Args:
        where: how messages name the checkpoint
        path: the path of the tensor in the state
        fields: its description in an index
        own: the rank whose replica of a part is preferred: they have the same values

    Raises:
        ProtocolError: the description is not valid
    """
    try:
        dtype = getattr(torch, fields["dtype"].removeprefix("torch."))
        shape = checked_sizes(fields["global_shape"])
        shards: dict[Box, Shard] = {}
        for one in sorted(fields["parts"], key=lambda part: part["rank"] != own):
            shard = Shard(
                checked_size(one["rank"]),
                checked_sizes(one["offsets"]),
                checked_sizes(one["shape"]),
                [checked_size(step) for step in one["stride"]],
                one["storage"],
                checked_size(one["storage_offset"]),
            )
            if len({len(length) for length in (shard.offsets, shard.shape, shard.stride, shape)}) != 1:
                raise ValueError("its fields contradict each other")
            shards.setdefault(shard.box, shard)
        if not isinstance(dtype, torch.dtype):
            raise ValueError("it has no dtype")
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise ProtocolError(f"{where}: its index has no valid description of {path} ({e})") from e
    return dtype, shape, list(shards.values())


def why_incomplete(shape: Sequence[int], shards: Sequence[Shard]) -> str | None:
    """Returns why ``shards`` do not have each element of a tensor exactly once; ``None`` if they do."""
    return why_not_whole(shape, [shard.box for shard in shards], [f"rank {shard.rank}" for shard in shards])


def entry_of(storages: Sequence[Any], sizes: Sequence[int], number: Any, start: int, span: int) -> tuple[int, int]:
    """Returns the entry of a container with the bytes ``[start, start + span)`` of a storage, and where they are in it.

    Args:
        storages: the storages in the container's manifest
        sizes: the length of each entry in bytes
        number: the number of the storage
        start: the first byte
        span: how many bytes

    Raises:
        KeyError: no entry has them
    """
    if type(number) is int and 0 <= number < len(storages):
        for entry, low in storages[number][1]:
            if low <= start and start + span <= low + sizes[entry]:
                return entry, start - low
    raise KeyError(number)
