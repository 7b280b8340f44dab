"""``tensorferry pull``: fetches what running peers serve into a file or a folder."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..errors import InvalidArgument, SystemRefused
from . import console, exits
from .flags import Json, Receiving, Switch, Trust


def pull(
    metadata: str,
    /,
    *more: str,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    into_folder: Path | None = None,
    step: int | None = None,
    quiet: Switch = False,
    json: Json = False,
    receiving: Receiving = Receiving(),  # noqa: B008 - it is frozen
    trust: Trust = Trust(),  # noqa: B008
) -> int:
    """Fetches what running transports serve, verified, into a file or a folder.

    What is incomplete has a name that ends in .partial. After an interruption, the same command goes on: what is there
    is compared with the source's digests, and only the rest is fetched.

    Args:
        metadata: what metadata() of a transport or a PeerWriter returned, or `tensorferry serve` printed
        more: the metadata of further sources of the same state, which are fetched from at once
        output: the file, a safetensors file with checksums; by default step-N.safetensors
        into_folder: a checkpoint folder, which AsyncCheckpointer.load or, for a PeerWriter's publication, FileReader
            loads
        step: the step to fetch (default: the one that is served)
        quiet: show no progress
        json: print the result as one JSON document
        receiving: the deadline and the connections
        trust: what the sources have to prove
    """
    from .sources import Peers

    if output is not None and into_folder is not None:
        raise InvalidArgument("--output and --into-folder exclude each other")
    found = Peers.of([metadata, *more], trust)
    pulled = _Pull(step if step is not None else found.step, receiving, trust, quiet)
    if found.are_ranks:
        if into_folder is None:
            raise InvalidArgument(
                "this is the metadata of a distributed checkpoint, which has several files: name a folder with "
                "--into-folder"
            )
        pulled.ranks(found.urls, into_folder)
    elif into_folder is not None:
        pulled.folder(found.urls, into_folder)
    else:
        pulled.file(found.urls, output)
    if json:
        console.out_json(pulled.result)
    else:
        told = pulled.result
        console.out(
            f"{told['path']}: step {told['step']}, {console.amount(told['bytes'])}, of which "
            f"{console.amount(told['fetched'])} were fetched in {told['seconds']:.1f} s over {told['lanes']} lanes"
        )
    return exits.OK


class _Pull:
    """One run of the verb.

    Args:
        step: the step to fetch, ``None`` for the one that is served
        receiving: the deadline and the connections
        trust: what the sources have to prove
        quiet: show no progress

    Attributes:
        result: what was fetched
    """

    def __init__(self, step: int | None, receiving: Receiving, trust: Trust, quiet: bool) -> None:
        self._step, self._receiving, self._trust, self._quiet = step, receiving, trust, quiet
        self._began = time.monotonic()
        self.result: dict[str, Any] = {"bytes": 0, "fetched": 0, "lanes": 0, "retries": 0}

    def file(self, urls: list[str], output: Path | None) -> None:
        """Pulls a state into a file."""

        def place(step: int) -> tuple[Path, Path]:
            path = output if output is not None else Path(f"step-{step}.safetensors")
            if path.is_dir():
                raise InvalidArgument(f"{path} is a folder: use --into-folder, or name a file in it")
            # The rename at the end would put the file in the place of a device such as /dev/null.
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise InvalidArgument(f"{path} is a link, a pipe or a device, which a file would replace: name a file")
            return path, path.with_name(f"{path.name}.partial")

        path, step = self._fetch(urls, place)
        self._done(path, step)

    def folder(self, urls: list[str], folder: Path) -> None:
        """Pulls a state into a checkpoint folder as a checkpointer writes it."""
        from ..storage.folder import FolderSave, KnownSaves, SaveId

        saves: list[FolderSave] = []

        def place(step: int) -> tuple[Path, Path]:
            save = SaveId.new(step=step, known=KnownSaves().began(folder))
            saves.append(FolderSave(folder, save))
            return saves[-1].path, folder / _partial_name(urls[:1], step)

        try:
            _, step = self._fetch(urls, place, unique=True)
            saves[-1].commit()
        finally:
            for save in saves:
                save.close()
        self._done(folder, step)

    def ranks(self, urls: list[str], folder: Path) -> None:
        """Pulls a distributed checkpoint, a file for each rank, and commits it by its index."""
        from ..storage import commits
        from ..storage.folder import INDEX, make_folder
        from ..storage.names import new_id
        from .distributed import write_index

        try:
            make_folder(folder)
        except OSError as e:
            raise SystemRefused(e.errno, f"{folder}: cannot be created: {e.strerror}") from e
        save_id, began, names = new_id(), commits.begin_after(commits.began(folder / INDEX)), []
        for rank, url in enumerate(urls):
            name = f"rank{rank:05d}-{save_id}.safetensors"

            def place(step: int, url: str = url, name: str = name) -> tuple[Path, Path]:
                return folder / name, folder / _partial_name([url], step)

            _, self._step = self._fetch([url], place, unique=True, title=f"rank {rank} of {len(urls)}")
            names.append(name)
        write_index(folder, self._step or 0, dict(zip(urls, names, strict=True)), began)
        self._done(folder, self._step)

    def _fetch(self, urls: list[str], place: Any, *, unique: bool = False, title: str = "") -> tuple[Path, int]:
        """Fetches one container; ``place`` returns, for its step, the names of the file: complete and incomplete."""
        from ..storage.download import Download
        from .progress import Progress
        from .sources import open_source

        with Progress(title or "fetching", quiet=self._quiet) as progress:
            remote, step = open_source(urls, self._step, self._trust, self._receiving, progress)
            with contextlib.closing(remote):
                path, partial = place(step)
                download = Download(remote, partial, unique=unique)
                try:
                    report = download.fetch()
                    download.commit(path)
                except KeyboardInterrupt:
                    console.note(f"{partial} holds what has arrived: the same command goes on from there")
                    raise
                finally:
                    download.close()
        told = self.result
        told["bytes"] += sum(remote.sizes)
        told["fetched"] += report.bytes
        told["lanes"] = max(told["lanes"], report.lanes)
        told["retries"] += report.retries
        for source, trouble in report.troubles.items():
            console.note(f"tensorferry: warning: ranges of {source} were fetched over other connections: {trouble}")
        return path, step

    def _done(self, path: Path, step: int | None) -> None:
        self.result |= {"path": os.fspath(path), "step": step, "seconds": time.monotonic() - self._began}


def _partial_name(urls: list[str], step: int) -> str:
    """Returns the name of an incomplete file in a folder, the same for the same source and step."""
    import hashlib

    named = hashlib.blake2b("\0".join([*urls, str(step)]).encode(), digest_size=8).hexdigest()
    return f".pull-{named}.partial"
