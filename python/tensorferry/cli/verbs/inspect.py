"""``tensorferry inspect``: what a checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._validate import readable
from .. import console, exits, peers
from ..below import checkpoints_below
from ..listing import listings, of_all_ranks

if TYPE_CHECKING:
    from ..leaf import Listing


def inspect(
    path: str,
    /,
    *more: str,
    digests: bool = False,
    step: int | None = None,
    timeout: float = peers.TIMEOUT,
    json: bool = False,
) -> int:
    """Shows what a checkpoint holds: its leaves, dtypes, shapes and sizes, what shares memory, shards, digests.

    Of a folder of checkpoints it lists these, the newest first, and what unfinished saves have left beside them.

    Args:
        path: a file, a folder, the URL of one in an object store, or the metadata of a running peer
        more: the metadata of further sources
        digests: show the digest of each tensor, CRC-64/NVME of its bytes; a file without checksums is read for it
        step: of a peer, the step (default: the one that is served)
        timeout: seconds in which a peer must answer
        json: print one JSON document, with the leaves of each rank
    """
    peers.refuse_without_peers([path, *more], step, timeout)
    if not more and not digests and path and not peers.is_metadata(path) and (below := checkpoints_below(path)):
        if json:
            console.out_json({"checkpoints": [one.fields() for one in below]})
        else:
            console.out_table(["name", "step", "bytes", "ranks", "saved", ""], [one.row() for one in below], right=[2])
        return exits.OK
    found = listings([path, *more], step, timeout, digests=digests)
    if json:
        console.out_json([{"name": name, **_fields(listing)} for name, listing in found])
    elif len(found) == 1:
        _show(*found[0], digests)
    else:
        _show(path, of_all_ranks(found), digests)
    return exits.OK


def _fields(listing: Listing) -> dict[str, Any]:
    """Returns a listing for JSON."""
    return {
        **listing.about,
        "tree": listing.tree,
        "leaves": [leaf.fields() for leaf in listing.leaves],
        "hidden": listing.hidden,
    }


def _show(name: str, listing: Listing, digests: bool) -> None:
    """Prints a listing: a line about all of it, a table of its leaves."""
    about, leaves = listing.about, listing.leaves
    tensors = sum(leaf.kind not in ("object", "alias") for leaf in leaves)
    checked = "with checksums" if about.get("checksums") else "without checksums"
    step = "" if about.get("step") is None else f", step {about['step']}"
    # An index has an object such as the settings of an optimizer in one piece; convert counts what is in it.
    others = "objects of one or more leaves" if "distributed" in about["kind"] else "other leaves"
    console.out(
        f"{name}: {about['kind']}{step}, {readable(about.get('bytes', 0))} in {tensors} tensors and "
        f"{len(leaves) - tensors} {others}, {checked}"
    )
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
