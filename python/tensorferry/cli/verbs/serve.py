"""``tensorferry serve``: publishes the checkpoint in a file or folder as a transport publishes a live state."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..._native import FilePages, Server, Shelf
from ...errors import InvalidArgument, SourceChanged
from .. import exits
from ..flags import Json, Serving, Switch, Trust
from ..output import console

#: Seconds that a request waits, and that receivers have when the command ends.
_PATIENCE_S = 60.0
_END_S = 5.0
#: Seconds between two looks at the files that are served.
_LOOK_S = 0.2


def serve(
    path: str,
    /,
    *,
    step: int | None = None,
    unverified: Switch = False,
    json: Json = False,
    serving: Serving = Serving(),  # noqa: B008 - it is frozen
    trust: Trust = Trust(),  # noqa: B008
) -> int:
    """Publishes a checkpoint until it is interrupted, and prints the metadata for receivers.

    A safetensors file, and files and folders of tensorferry, are served from where they are, by HTTPTransport's server,
    and so is a torch.save file, without being read into memory. They may be removed meanwhile, or replaced by a rename;
    if their content is changed, receives fail and the command ends with an error. A distributed checkpoint of torch is
    read first. What tensorferry.megatron saved is for its load_strategy(peers=).

    Args:
        path: a file or a folder, or the URL of one in an object store, which is copied to this machine first
        step: the step number to serve it as (default: that of the checkpoint, or 0; of a distributed checkpoint, 1)
        unverified: do not compare files with their checksums before they are served
        json: print the metadata as one JSON document
        serving: how it is reached
        trust: what protects it
    """
    from ...net.options import wants_relay
    from ...net.serve import start
    from ...storage.places import is_store_url
    from .. import copying, places

    place = places.settled(lambda: places.find(path), path)
    if is_store_url(path):
        with copying.local(place, verify=not unverified) as here:
            return serve(here.text, step=step, unverified=unverified, json=json, serving=serving, trust=trust)
    # The index of torch's own backend does not have the common state, without which Megatron loads nothing.
    kind = place.layout if place.layout is places.CheckpointKind.DISTRIBUTED else place.kind
    options = serving.options(trust)
    if place.kind is places.CheckpointKind.PEERS:
        raise InvalidArgument("a running peer serves already: pull from it")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server, host = start(_PATIENCE_S, options, wants_relay(serving.relay))
    try:
        # It holds the shelves, which serve for as long as they are there.
        publisher = Publisher(server, host, step, unverified)
        published = places.settled(lambda: publishers()[kind](publisher, place.path), path, attempts=1)
        if json:
            console.out_json(published)
        else:
            console.note(f"serving {path} as step {published['step']}; end with Ctrl-C")
            for one in published["metadata"]:
                print(one, flush=True)
        while not ended.wait(_LOOK_S):
            if changed := publisher.files.changed():
                raise SourceChanged(
                    f"{', '.join(map(str, changed))} was changed while it was served, so receives fail: serve it "
                    "again. What is served may be removed, or replaced by a rename"
                )
    finally:
        server.shutdown(_END_S)
    return exits.OK


class Publisher:
    """Publishes on one server; each method takes a path and returns what is printed as JSON.

    It raises a ``TensorferryError`` if what is there cannot be read, is damaged or incomplete, or cannot be served.

    Args:
        server: the server
        host: the host in its URLs
        step: the step that was asked for
        unverified: do not compare files with their checksums

    Attributes:
        files: the files whose pages are served
    """

    def __init__(self, server: Server, host: str, step: int | None, unverified: bool) -> None:
        self._server, self._host, self._step, self._unverified = server, host, step, unverified
        from ..mapped import ServedFiles

        self._shelves: list[Shelf] = []
        self.files = ServedFiles()

    def container(self, path: Path) -> dict[str, Any]:
        """Publishes a container file."""
        step = self._step or 0
        self._publish(path, self._server, step)
        return self._published(step, [self._server.url(self._host)], path)

    def archive(self, path: Path) -> dict[str, Any]:
        """Publishes what ``torch.save`` wrote."""
        from ...memory.accelerator import ACCELERATOR
        from ...memory.staging import HostStager
        from ...state.snapshot import StateSnapshot
        from ...torchft import compat
        from ..mapped_states import state_of_archive

        step = self._step or 0
        pages: list[FilePages] = []
        with self.files.opening(path):
            self._verify(path, archive=True)
            packed = StateSnapshot(state_of_archive(path, pages), HostStager(ACCELERATOR), "borrow")
        bodies = compat.bodies(packed.rebuild, 0)
        packed.container().publish(self._server, step, alternate=bodies, pages=self.files.add(path, *pages))
        return self._published(step, [self._server.url(self._host)], path)

    def checkpoint(self, folder: Path) -> dict[str, Any]:
        """Publishes the state of each rank of a checkpointer's folder, each under an address of its own."""
        from ..intact import files_of_ranks

        index, files = files_of_ranks(folder)
        step = self._step if self._step is not None else (index.step or 0)
        urls = []
        for path in files:
            where: Server | Shelf = self._server
            if index.world_size > 1:
                where = self._server.shelf()
                self._shelves.append(where)
            self._publish(path, where, step)
            urls.append(where.url(self._host))
        return self._published(step, urls, folder)

    def distributed(self, folder: Path) -> dict[str, Any]:
        """Publishes a distributed checkpoint as the ranks of a job with ``PeerWriter`` would."""
        import json

        from ...storage import commits, reserved
        from ...storage.folder import INDEX
        from ...storage.peers import container_name, publication_metadata
        from ..leaves import distributed

        text, commit = commits.read(folder / INDEX)
        fields = distributed.decoded(text, folder / INDEX)
        step = self._step if self._step is not None else 1
        if step < 0:
            raise InvalidArgument("the step of a distributed checkpoint must not be negative")
        names = distributed.checked_files(folder, fields["sources"], commit)
        shelves = [self._server.shelf() for _ in names] or [self._server.shelf()]
        urls = [shelf.url(self._host) for shelf in shelves]
        fields["sources"] = [container_name(step, url) for url in urls[: len(names)]]
        index = (reserved.INDEX, json.dumps(fields, separators=(",", ":")).encode())
        for number, shelf in enumerate(shelves):
            control = [index] if number == 0 else []
            if names:
                self._publish(folder / names[number], shelf, step, control)
            else:
                distributed.index_container(control).publish(shelf, step)
        self._shelves += shelves
        return self._published(step, [publication_metadata(step, urls)], folder)

    def torch_distributed(self, folder: Path) -> dict[str, Any]:
        """Reads a distributed checkpoint of torch, and publishes it as a state."""
        from ...memory.accelerator import ACCELERATOR
        from ...memory.staging import HostStager
        from ...state.snapshot import StateSnapshot
        from ...torchft import compat
        from ..mapped_states import state_of_distributed

        step = self._step or 0
        packed = StateSnapshot(state_of_distributed(folder), HostStager(ACCELERATOR), "borrow")
        packed.publish(self._server, step, compat.bodies(packed.rebuild, 0))
        return self._published(step, [self._server.url(self._host)], folder)

    def megatron(self, folder: Path) -> dict[str, Any]:
        """Raises: a checkpoint of one of Megatron's own backends is converted first."""
        raise InvalidArgument(
            f"{folder} is a checkpoint of one of Megatron's own backends: run `tensorferry convert {folder} OUT --to "
            "dcp`, and serve OUT"
        )

    def shards(self, folder: Path) -> dict[str, Any]:
        """Publishes a model in several files of another program as the state that maps its names to its tensors."""
        from ...memory.accelerator import ACCELERATOR
        from ...memory.staging import HostStager
        from ...state.snapshot import StateSnapshot
        from ...torchft import compat
        from ..leaves.shards import files_of
        from ..mapped_states import state_of_shards

        step = self._step or 0
        pages: list[FilePages] = []
        paths = list(files_of(folder))
        with contextlib.ExitStack() as stack:
            for path in paths:
                stack.enter_context(self.files.opening(path))
                self._verify(path)
            packed = StateSnapshot(state_of_shards(folder, pages), HostStager(ACCELERATOR), "borrow")
        for path, one in zip(paths, pages, strict=True):
            self.files.add(path, one)
        bodies = compat.bodies(packed.rebuild, 0)
        packed.container().publish(self._server, step, alternate=bodies, pages=pages)
        return self._published(step, [self._server.url(self._host)], folder)

    def _publish(
        self, path: Path, where: Server | Shelf, step: int, control: list[tuple[str, bytes]] | None = None
    ) -> None:
        """Publishes the container in a file; with ``control``, as part of a distributed checkpoint."""
        from ..mapped import container_of

        with self.files.opening(path):
            self._verify(path)
            container, pages = container_of(path, control)
        alternate = _stock_bodies(path, pages) if control is None else None
        container.publish(where, step, alternate=alternate, pages=self.files.add(path, pages))

    def _verify(self, path: Path, *, archive: bool = False) -> None:
        """Refuses a file that does not match its checksums, unless nothing is to be verified."""
        from ..intact import require_undamaged

        if not self._unverified:
            require_undamaged(path, archive=archive)

    def _published(self, step: int, metadata: list[str], path: Path) -> dict[str, Any]:
        return {"metadata": metadata, "step": step, "path": str(path)}


def _stock_bodies(path: Path, pages: FilePages) -> Callable[[str], list[Any] | str | None]:
    """Returns what renders torchft's own bytes of the state in a file, which is read when they are first requested.

    It is read by its descriptor: the name may lead to another file by then.
    """
    render: list[Callable[[str], list[Any] | None]] = []
    lock = threading.Lock()

    def rendered(name: str) -> list[Any] | None:
        with lock:
            if not render:
                from ...checkpointing.loading import load_file
                from ...torchft import compat

                state = load_file(f"/proc/self/fd/{pages.fileno()}")
                if not pages.is_unchanged:
                    raise SourceChanged(f"{path} was changed while it was served")
                render.append(compat.bodies(lambda: state, 0))
        return render[0](name)

    return rendered


def publishers() -> dict[Any, Callable[[Publisher, Path], dict[str, Any]]]:
    """Returns what publishes each kind of checkpoint."""
    from ..places import CheckpointKind

    return {
        CheckpointKind.CONTAINER: Publisher.container,
        CheckpointKind.ARCHIVE: Publisher.archive,
        CheckpointKind.CHECKPOINT: Publisher.checkpoint,
        CheckpointKind.DISTRIBUTED: Publisher.distributed,
        CheckpointKind.TORCH_DISTRIBUTED: Publisher.torch_distributed,
        CheckpointKind.MEGATRON: Publisher.megatron,
        CheckpointKind.SHARDS: Publisher.shards,
    }
