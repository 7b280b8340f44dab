"""``tensorferry diff``: which leaves of two checkpoints or running peers differ."""

from __future__ import annotations

import contextlib
from typing import Any

from .. import exits
from ..flags import Json, Receiving, Switch, Trust
from ..output import console


def diff(
    a: str,
    b: str,
    /,
    *,
    step: int | None = None,
    summary: Switch = False,
    json: Json = False,
    receiving: Receiving = Receiving(),  # noqa: B008 - it is frozen
    trust: Trust = Trust(),  # noqa: B008
) -> int:
    """Shows which leaves of two checkpoints differ.

    Digests are compared first; bytes are read only of leaves that have none, or whose digests say nothing because the
    two are stored in different shards. Exits with 0 if all is the same, with 1 if something differs, and with 2 or more
    after an error.

    Args:
        a: a file, a folder, the URL of one in an object store, or the metadata of running peers
        b: another one
        step: of peers, the step (default: the one that is served)
        summary: print a line for each part of the state, such as the model, instead of one for each leaf
        json: print one JSON document
        receiving: the deadline and the connections, for peers
        trust: what peers have to prove
    """
    from .. import places
    from ..leaves.comparison import Comparison
    from ..sources import refuse_without_peers

    refuse_without_peers([a, b], step, receiving, trust)

    # Values are read after the listings: both must be of one save.
    def compared() -> dict[str, Any]:
        with contextlib.closing(Comparison(a, b, step, receiving, trust)) as comparison:
            return comparison.run()

    found = places.settled(compared, a, b, still=True)
    if json:
        console.out_json(found)
    else:
        _show(found, summary)
    return exits.OK if found["same"] else exits.NO


def _show(found: dict[str, Any], summary: bool) -> None:
    lines = [f"{one['path']}: {one['how']}" for one in found["differences"]]
    for line in _summed(found["differences"]) if summary else lines:
        console.out(line)
    counts = f"{found['by_digest']} leaves compared by digest, {found['by_bytes']} by their bytes"
    console.note("the same: " + counts if found["same"] else f"{len(found['differences'])} leaves differ; {counts}")


def _summed(differences: list[dict[str, str]]) -> list[str]:
    """Returns a line for each first key of the paths that differ, by rank if there are several."""
    parts: dict[str, list[str]] = {}
    for one in differences:
        rank, at, path = one["path"].rpartition(": ")
        parts.setdefault(rank + at + path.partition(".")[0], []).append(path)
    return [f"{part}: {len(paths)} leaves differ, such as {paths[0]}" for part, paths in parts.items()]
