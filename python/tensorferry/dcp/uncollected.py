"""A save in which torch collects nothing: the index is made of what each rank has planned and written alone."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from .._native import Index
from ..errors import InvalidArgument
from .index import RankPart
from .save_plan import not_for_others


class OwnPart(NamedTuple):
    """What a rank tells of its part of a save.

    Attributes:
        path: the folder
        part: what it has written
        encoded: the index of that alone
        with_parts: the keys of its objects that hold its part of a tensor
    """

    path: str
    part: RankPart
    encoded: bytes
    with_parts: set[str]


def merged(ranks: Sequence[OwnPart]) -> bytes:
    """Returns the encoded index of what all ranks have. What several have is taken from the first of them.

    Raises:
        InvalidArgument: the ranks save into different folders, or the parts of a tensor do not make it up
        UnsupportedLeaf: an object that several ranks have holds a part of a tensor
    """
    for rank, own in enumerate(ranks):
        if own.path != ranks[0].path:
            raise InvalidArgument(
                f"rank {rank} saves into {own.path}, and rank 0 into {ranks[0].path}: give all the same"
            )
    index, _ = Index.merge([own.encoded for own in ranks], replicas="first", whole=True)
    alone = [Index.decode(own.encoded, 1) for own in ranks]
    for own in ranks:
        for fqn in own.with_parts:
            if sum(of_rank.find(fqn) is not None for of_rank in alone) > 1:
                raise not_for_others(fqn)
    index.planner = alone[0].planner
    names = sorted(own.part.container for own in ranks if own.part.header is not None)
    files = [names.index(own.part.container) if own.part.header is not None else 0 for own in ranks]
    return index.written([zlib.decompress(own.part.encoded) for own in ranks], files, True).encode()
