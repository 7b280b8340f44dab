"""Folders of distributed checkpoints, as far as they can be handled without torch: their index as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .._native import Rows, _file_entries, _file_header
from ..errors import ProtocolError
from ..storage import commits, reserved
from ..storage.container import Container
from ..storage.folder import INDEX
from ..storage.peers import container_name

#: As ``dcp/save_plan.py`` has it.
_ABOUT = (("tensorferry.dcp", "1"),)


def decoded(text: bytes, where: object) -> dict[str, Any]:
    """Returns the fields of the index ``text``.

    Raises:
        ProtocolError: it is not an index of this version
    """
    try:
        fields = json.loads(text)
        if fields["version"] != 1:
            raise ValueError(f"it has version {str(fields['version'])[:20]}")
        if not isinstance(fields["sources"], list) or not isinstance(fields["state"], dict):
            raise ValueError("a field of it has another type")
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ProtocolError(f"{where}: its index cannot be read ({type(e).__name__}: {e})") from e
    return dict(fields)


def write_index(folder: Path, step: int, names: dict[str, str], began: int) -> None:
    """Commits a distributed checkpoint that was pulled: writes its index, which names files instead of peers.

    Args:
        folder: the folder
        step: the step of the publication
        names: the file of each rank by its URL; the first one has the index
        began: when the pull began, in nanoseconds since the epoch

    Raises:
        ProtocolError: the first rank has no index, or its index names other peers
    """
    from ..dcp import marker

    files = list(names.values())
    (text,) = _file_entries(folder / files[0], [reserved.INDEX])
    if text is None:
        raise ProtocolError("the first rank serves no index of a distributed checkpoint")
    fields = decoded(text, "the publication")
    of_peers = {container_name(step, url): name for url, name in names.items()}
    try:
        fields["sources"] = [of_peers[source] for source in fields["sources"]]
    except (KeyError, TypeError):
        raise ProtocolError("the index names a source that the metadata does not") from None
    headers: dict[str, int | None] = {name: _file_header(folder / name) for name in files}
    save_id = commits.new_id()
    control = [
        (reserved.INDEX, json.dumps(fields, separators=(",", ":")).encode()),
        (reserved.INDEX_FILES, commits.Commit(headers, began).encode()),
    ]
    index = folder / INDEX
    with commits.holding(folder, files):
        before = commits.committed(index)
        Container(Rows(object, object, {}, native=False), None, True, control, _ABOUT).write(
            index, partial=folder / f"{INDEX}.{save_id}.partial", threads=1
        )
        marker.leave(index, save_id)
        commits.remove_replaced(index, before, set(files), None)
