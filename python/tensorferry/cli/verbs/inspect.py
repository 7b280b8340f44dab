"""``tensorferry inspect``: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import exits
from ..flags import Json, Receiving, Switch, Trust
from ..output import console

if TYPE_CHECKING:
    from ..leaves.leaf import Leaf, Listing

#: With more leaves than this, the largest ones are listed once more.
_MANY = 20


def inspect(
    path: str,
    /,
    *more: str,
    largest: int = 5,
    digests: Switch = False,
    step: int | None = None,
    json: Json = False,
    receiving: Receiving = Receiving(),  # noqa: B008 - it is frozen
    trust: Trust = Trust(),  # noqa: B008
) -> int:
    """Shows what a checkpoint holds: its tree, dtypes, shapes and sizes, what shares memory, shards, digests.

    Of a folder of checkpoints it lists these, the newest first, and what unfinished saves have left beside them.

    Args:
        path: a file, a folder, the URL of one in an object store, or the metadata of a running peer
        more: the metadata of further sources
        largest: how many of the largest leaves are listed once more at the end
        digests: show the digest of each tensor, CRC-64/NVME of its bytes; a file without checksums is read for it
        step: of a peer, the step (default: the one that is served)
        json: print one JSON document
        receiving: the deadline and the connections, for a peer
        trust: what a peer has to prove
    """
    from ..checkpoints_below import checkpoints_below
    from ..leaves.listing import listings
    from ..sources import is_metadata, refuse_without_peers

    refuse_without_peers([path, *more], step, receiving, trust)
    if not more and not digests and path and not is_metadata(path) and (below := checkpoints_below(path)):
        if json:
            console.out_json({"checkpoints": [one.fields() for one in below]})
        else:
            console.out_table(["name", "step", "bytes", "ranks", "saved", ""], [one.row() for one in below], right=[2])
        return exits.OK
    found = listings([path, *more], step, receiving, trust, digests=digests)
    if json:
        console.out_json([{"name": name, **_fields(listing)} for name, listing in found])
        return exits.OK
    for number, (name, listing) in enumerate(found):
        if number:
            console.out()
        _show(name, listing, largest, digests)
    return exits.OK


def _fields(listing: Listing) -> dict[str, Any]:
    """Returns a listing for JSON."""
    return {
        **listing.about,
        "tree": listing.tree,
        "leaves": [leaf.fields() for leaf in listing.leaves],
        "hidden": listing.hidden,
    }


def _show(name: str, listing: Listing, largest: int, digests: bool) -> None:
    """Prints a listing: a line about all of it, a table of its leaves, and one of the ``largest`` of many."""
    about, leaves = listing.about, listing.leaves
    tensors = sum(leaf.kind not in ("object", "alias") for leaf in leaves)
    checked = "with checksums" if about.get("checksums") else "without checksums"
    step = "" if about.get("step") is None else f", step {about['step']}"
    # An index has an object such as the settings of an optimizer in one piece; convert counts what is in it.
    others = "objects of one or more leaves" if "distributed" in about["kind"] else "other leaves"
    console.out(
        f"{name}: {about['kind']}{step}, {console.amount(about.get('bytes', 0))} in {tensors} tensors and "
        f"{len(leaves) - tensors} {others}, {checked}"
    )
    _table(leaves, digests)
    if len(leaves) > _MANY and largest > 0:
        console.out("largest:")
        _table(sorted(leaves, key=lambda leaf: -leaf.bytes)[:largest], digests)
    if digests and any(leaf.digest is None for leaf in leaves):
        console.note("-: objects, views and tensors in pieces have no digest of their own")


def _table(leaves: Iterable[Leaf], digests: bool) -> None:
    """Prints leaves as a table."""
    heads = ["path", "dtype", "shape", "bytes", *(["digest"] if digests else []), ""]
    rows = [
        [
            leaf.path,
            leaf.dtype or leaf.kind,
            "x".join(map(str, leaf.shape)) if leaf.dtype else "",
            leaf.bytes if leaf.dtype else "",
            *([leaf.digest or "-"] if digests else []),
            ", ".join(leaf.notes),
        ]
        for leaf in leaves
    ]
    console.out_table(heads, rows, right=[3])
