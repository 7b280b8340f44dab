"""The doors through which a state comes into the tensors of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from checkpoint_loads import rank_file, save_state
from tensorferry import HTTPTransport
from tensorferry._native import Stored
from tensorferry.checkpointing import load_file, loading
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter
from tensorferry.pickles.allowlist import Allowed
from tensorferry.state.in_place import InPlaceTargets

SECONDS = timedelta(seconds=30)

#: Takes the state that is saved or sent, the one that it comes into, a folder, and the globals of their pickles.
Door = Callable[[Any, Any, Path, Iterable[Any]], Any]


def transport(saved: Any, live: Any, _: Path, names: Iterable[Any] = ()) -> Any:
    with (
        HTTPTransport(SECONDS, interface="127.0.0.1") as source,
        HTTPTransport(SECONDS, interface="127.0.0.1", state_dict=lambda: live, safe_globals=names) as target,
    ):
        source.send_checkpoint([1], 1, saved, SECONDS)
        return target.recv_checkpoint(0, source.metadata(), 1, SECONDS)


def stock(saved: Any, live: Any, *_: Any) -> Any:
    """What remains of a receive from torchft's own transport once it has the state."""
    return InPlaceTargets(live).fill(saved)


def folder(saved: Any, live: Any, path: Path, names: Iterable[Any] = ()) -> Any:
    return loading.read(save_state(path / "c", saved), live, allowed=Allowed(names))[0]


def keeper(saved: Any, live: Any, path: Path, names: Iterable[Any] = ()) -> Any:
    kept = rank_file(save_state(path / "kept", saved))
    return loading.read(path / "none", live, allowed=Allowed(names), prefer=lambda *_: Stored.open(kept))[0]


def file(saved: Any, live: Any, path: Path, names: Iterable[Any] = ()) -> Any:
    return load_file(rank_file(save_state(path / "c", saved)), live, safe_globals=names)


def archive(saved: Any, live: Any, path: Path, names: Iterable[Any] = ()) -> Any:
    torch.save(saved, path / "archive.pt")
    return load_file(path / "archive.pt", live, safe_globals=names)


def dcp_files(saved: Any, live: Any, path: Path, *_: Any) -> Any:
    dcp.save(saved, storage_writer=FileWriter(path / "dcp"))
    dcp.load(live, storage_reader=FileReader(path / "dcp"))
    return live


def dcp_peers(saved: Any, live: Any, *_: Any) -> Any:
    writer = PeerWriter(SECONDS, interface="127.0.0.1")
    try:
        dcp.save(saved, storage_writer=writer)
        dcp.load(live, storage_reader=PeerReader(writer.metadata(), timeout=SECONDS))
    finally:
        writer.shutdown()
    return live


#: Those that match whole states.
STATE_DOORS: list[Door] = [transport, stock, folder, keeper, file, archive]
#: Those whose plan comes from torch.
PLAN_DOORS: list[Door] = [dcp_files, dcp_peers]
