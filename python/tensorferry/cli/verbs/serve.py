"""``tensorferry serve``: publishes the checkpoint in a file or folder as a transport publishes a live state."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from typing import Any

from ..._native import Server, Shelf
from ..._validate import amount
from ...errors import InvalidArgument, SourceChanged
from ...net.network import Network
from ...net.serve import start
from ...storage import reserved
from ...storage.peers import publication_metadata
from .. import console, copying, distributed, exits, places
from ..intact import files_of_ranks, require_undamaged
from ..mapped import ServedFiles, container_of
from ..places import CheckpointKind

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
    interface: str | None = None,
    port: str | None = None,
    max_bandwidth: str | None = None,
    unverified: bool = False,
    json: bool = False,
) -> int:
    """Publishes a checkpoint until it is interrupted, and prints the metadata for receivers.

    A safetensors file, and files and folders of tensorferry, are served from where they are, by HTTPTransport's server,
    without being read into memory. They may be removed meanwhile, or replaced by a rename; if their content is changed,
    receives fail and the command ends with an error. Anything else is converted first, with `tensorferry convert`. What
    tensorferry.megatron saved is for its load_strategy(peers=).

    The secret, TLS and what else protects a server come from the environment, such as TENSORFERRY_SECRET_FILE.

    Args:
        path: a file or a folder, or the URL of one in an object store, which is copied to this machine first
        step: the step number to serve it as (default: that of the checkpoint, or 0; of a distributed checkpoint, 1)
        interface: listen only on this interface, address or network, or on several with commas (default: all)
        port: listen on this port, or on the first free one of a range like 29600-29699 (default: any)
        max_bandwidth: bytes per second for all receivers together, such as 500M (K, M and G are powers of 1024)
        unverified: do not compare files with their checksums before they are served
        json: print the metadata as one JSON document
    """
    place = places.settled(lambda: places.find(path), path)
    # The index of torch's own backend does not have the common state, without which Megatron loads nothing.
    kind = place.layout if place.layout is places.CheckpointKind.DISTRIBUTED else place.kind
    publish = publishers().get(kind)
    if kind is places.CheckpointKind.PEERS:
        raise InvalidArgument("a running peer serves already: pull from it")
    if publish is None:
        to = (
            "dcp"
            if kind in (places.CheckpointKind.MEGATRON, places.CheckpointKind.TORCH_DISTRIBUTED)
            else "tensorferry"
        )
        raise InvalidArgument(
            f"{path} is a {kind.value}: run `tensorferry convert {path} OUT --to {to}`, and serve OUT"
        )
    limit = None if max_bandwidth is None else amount("--max-bandwidth", max_bandwidth)
    network = Network(interface=interface, port=port, max_bandwidth=limit)
    ended = threading.Event()
    with copying.local(place, verify=not unverified) as here, contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        server, host = start(_PATIENCE_S, network)
        stack.callback(server.shutdown, _END_S)
        # It holds the shelves, which serve for as long as they are there.
        publisher = Publisher(server, host, step, unverified)
        published = places.settled(lambda: publish(publisher, here.path), here.text, attempts=1)
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

        self._shelves: list[Shelf] = []
        self.files = ServedFiles()

    def container(self, path: Path) -> dict[str, Any]:
        """Publishes a container file."""
        step = self._step or 0
        self._publish(path, self._server, step)
        return self._published(step, [self._server.url(self._host)], path)

    def checkpoint(self, folder: Path) -> dict[str, Any]:
        """Publishes the state of each rank of a checkpointer's folder, each under an address of its own."""
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
        index, names = distributed.opened(folder)
        step = self._step if self._step is not None else 1
        if step < 0:
            raise InvalidArgument("the step of a distributed checkpoint must not be negative")
        shelves = [self._server.shelf() for _ in names] or [self._server.shelf()]
        urls = [shelf.url(self._host) for shelf in shelves]
        for number, shelf in enumerate(shelves):
            control = [(reserved.INDEX, index.encode())] if number == 0 else []
            if names:
                self._publish(folder / names[number], shelf, step, control)
            else:
                distributed.index_container(control).publish(shelf, step)
        self._shelves += shelves
        return self._published(step, [publication_metadata(step, urls)], folder)

    def _publish(
        self, path: Path, where: Server | Shelf, step: int, control: list[tuple[str, bytes]] | None = None
    ) -> None:
        """Publishes the container in a file; with ``control``, as part of a distributed checkpoint."""
        with self.files.opening(path):
            if not self._unverified:
                require_undamaged(path)
            container, pages = container_of(path, control)
        container.publish(where, step, pages=self.files.add(path, pages))

    def _published(self, step: int, metadata: list[str], path: Path) -> dict[str, Any]:
        return {"metadata": metadata, "step": step, "path": str(path)}


def publishers() -> dict[Any, Any]:
    """Returns what publishes each kind of checkpoint."""
    return {
        CheckpointKind.CONTAINER: Publisher.container,
        CheckpointKind.CHECKPOINT: Publisher.checkpoint,
        CheckpointKind.DISTRIBUTED: Publisher.distributed,
    }
