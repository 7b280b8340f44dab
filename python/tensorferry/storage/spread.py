"""Puts together what the ranks of a job say of the tensors that are spread over them; torch-free.

Each rank's manifest describes its own parts (docs/reference/format.md). Here they are shown to make up whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._native import Entries
from ..errors import InvalidArgument
from .boxes import Box, why_not_whole


@dataclass(frozen=True)
class RankState:
    """What one rank has saved, or serves.

    Attributes:
        manifest: returns its manifest, which may be long
        entries: returns its entries
        digests: returns the digest of each entry
    """

    manifest: Callable[[], bytes | None]
    entries: Callable[[], Entries]
    digests: Callable[[], Sequence[int]]


class _Part(NamedTuple):
    """A rank's part of a tensor, as an index describes it; ``owner`` is the mesh, or else the rank, with one value."""

    rank: int
    owner: tuple[str, int]
    fields: dict[str, Any]

    @property
    def box(self) -> Box:
        return Box(tuple(self.fields["offsets"]), tuple(self.fields["shape"]))


def spread_tensors(ranks: Sequence[RankState], *, whole: bool = True) -> dict[str, Any]:
    """Returns, by path, the tensors that are spread over ranks, as an index describes them.

    Args:
        ranks: the ranks, in their order
        whole: whether the parts have to make up whole tensors

    Raises:
        InvalidArgument: the parts of a tensor do not make up the whole, or the ranks have different tensors at its
            path; path, ranks and reason are named
        KeyError, TypeError, AttributeError: a manifest does not describe its parts validly
        TensorferryError: the entries of a rank cannot be read
    """
    tensors: dict[str, tuple[int, dict[str, Any], list[_Part]]] = {}
    having: dict[str, set[int]] = {}
    for rank, state in enumerate(ranks):
        manifest = state.manifest()
        if manifest is None or b'"global_shape"' not in manifest:
            continue
        for path, fields in json.loads(manifest)["shards"].items():
            if (reason := fields.get("refused")) is not None:
                raise InvalidArgument(f"{path} cannot be a part of a checkpoint: on rank {rank}, {reason}")
            about = {"dtype": fields.pop("dtype"), "global_shape": fields.pop("global_shape")}
            first, known, parts = tensors.setdefault(path, (rank, about, []))
            if known != about:
                raise InvalidArgument(
                    f"ranks {first} and {rank} have different tensors at {path}: {_brief(known)} and {_brief(about)}; "
                    "dtype and global shape must be the same on all ranks"
                )
            having.setdefault(path, set()).add(rank)
            mesh = fields.pop("mesh", None)
            owner = ("rank", rank) if mesh is None else ("mesh", mesh)
            # A DTensor has one part on most ranks, and a ShardedTensor has a list of them.
            for part in fields.get("parts", [fields]):
                part["rank"] = rank
                parts.append(_Part(rank, owner, part))
    _check_plain(ranks, having)
    digests = _Digests(ranks)
    for path, (_, about, parts) in tensors.items() if whole else ():
        if why := _why_not_whole(about["global_shape"], parts, digests):
            lacking = [str(rank) for rank in range(len(ranks)) if rank not in having[path]]
            those = f" (without it: rank {', '.join(lacking[:10])}{' ...' if lacking[10:] else ''})" if lacking else ""
            raise InvalidArgument(f"{path} cannot be a part of a checkpoint: {why}{those}")
    return {path: {**about, "parts": [part.fields for part in parts]} for path, (_, about, parts) in tensors.items()}


def _brief(about: dict[str, Any]) -> str:
    return f"{str(about['dtype']).removeprefix('torch.')} {about['global_shape']}"


def _check_plain(ranks: Sequence[RankState], having: dict[str, set[int]]) -> None:
    """Refuses a rank that has a tensor of its own at the path of one that is spread over other ranks."""
    for rank, state in enumerate(ranks):
        if not (lacking := [path for path, those in having.items() if rank not in those]):
            continue
        described = json.loads(state.manifest() or b'{"tensors":[]}')["tensors"]
        names = {*state.entries().names, *(row[1] for row in described)}
        for path in lacking:
            if path in names:
                raise InvalidArgument(
                    f"{path} is spread over ranks on rank {min(having[path])}, and a tensor of its own on rank {rank}: "
                    "give each a key of its own"
                )


def _why_not_whole(shape: list[int], parts: list[_Part], digests: _Digests) -> str | None:
    """Returns why parts do not make up a tensor of ``shape``, ``None`` if they do; replicas count once."""
    first: dict[Box, _Part] = {}
    for part in parts:
        replica = first.setdefault(part.box, part)
        # On one mesh, replicas have the same value.
        if replica.owner != part.owner and part.box.numel and not digests.are_same(replica, part):
            return (
                f"ranks {replica.rank} and {part.rank}, which are not of one mesh, have different values of {part.box} "
                "or such that cannot be compared: give each tensor a key of its own"
            )
    return why_not_whole(shape, list(first), [f"rank {part.rank}" for part in first.values()])


class _Digests:
    """The digests of ranks' parts, read when two are compared."""

    def __init__(self, ranks: Sequence[RankState]) -> None:
        self._ranks = ranks
        self._read: dict[int, tuple[list[Any], Sequence[int], Sequence[int]]] = {}

    def are_same(self, one: _Part, other: _Part) -> bool:
        """Whether two parts have the same bytes; false as well if one is not an entry of its container."""
        first = self._of(one)
        return first is not None and first == self._of(other)

    def _of(self, part: _Part) -> int | None:
        if part.rank not in self._read:
            state = self._ranks[part.rank]
            storages = json.loads(state.manifest() or b"{}")["storages"]
            self._read[part.rank] = storages, state.entries().sizes, state.digests()
        storages, sizes, digests = self._read[part.rank]
        fields, number = part.fields, part.fields["storage"]
        if type(number) is not int or not 0 <= number < len(storages):
            return None
        step = 1
        for length, there in zip(reversed(fields["shape"]), reversed(fields["stride"]), strict=True):
            if length != 1 and there != step:
                return None
            step *= length
        for entry, low in storages[number][1]:
            # An element has as many bytes as there are for each; the dtypes of both parts are the same.
            size, rest = divmod(sizes[entry], part.box.numel)
            if not rest and low == fields["storage_offset"] * size and entry < len(digests):
                return int(digests[entry])
        return None
