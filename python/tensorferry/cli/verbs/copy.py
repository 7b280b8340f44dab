"""``tensorferry copy``: copies a checkpoint between a folder and an object store."""

from __future__ import annotations

from ..._validate import readable
from ...errors import InvalidArgument
from ...storage.places import any_place
from .. import console, copying, exits, places


def copy(source: str, output: str, /, *, unverified: bool = False, json: bool = False) -> int:
    """Copies a checkpoint between a folder and an object store, or two stores, byte for byte.

    The index is written last, so that the output is a checkpoint only when it is complete. Nothing is replaced.

    Args:
        source: a file or a folder, or the URL of one in an object store, such as s3://bucket/run/step-1000
        output: a path or a URL that does not exist yet; at least one of the two is a URL
        unverified: do not compare the files with their checksums
        json: print the result as one JSON document
    """
    place = places.find(source)
    if place.kind is places.CheckpointKind.PEERS:
        raise InvalidArgument("a running peer has no files: pull from it")
    nbytes = copying.copy(place, any_place(output, "output"), verify=not unverified)
    if json:
        console.out_json({"output": output, "bytes": nbytes})
    else:
        console.out(f"{output}: {readable(nbytes)}")
    return exits.OK
