"""A checkpoint in the memory of another job, whose ranks serve a container each."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .._native import Arena, Remote, Server, _check_machine_has, _fetch_slices
from ..errors import ProtocolError
from ..net.metadata import is_encrypted
from ..net.network import Network
from . import reserved
from .slices import AHEAD, SliceTuple
from .source import Progress

logger = logging.getLogger("tensorferry")

#: The first word of a publication's metadata; its step and the URLs of the ranks follow.
SCHEME = "tensorferry-dcp/1"


def publication_metadata(step: int, urls: Sequence[str]) -> str:
    """Returns the metadata of a checkpoint that the ranks at ``urls`` serve as ``step``, for a ``PeerReader``."""
    return " ".join([SCHEME, str(step), *urls])


def container_name(step: int, url: str) -> str:
    """Returns the name by which an index refers to the container that ``url`` serves as ``step``."""
    return f"{step} {url}"


def url_of(container: str) -> str:
    """Returns the URL in a name that :func:`container_name` returned."""
    return container.partition(" ")[2]


def parse_publication(metadata: str) -> tuple[int, list[str]] | None:
    """Returns the step and the URLs in the metadata of a publication; ``None`` if it is no such metadata."""
    words = metadata.split()
    if len(words) < 3 or words[0] != SCHEME or not (words[1].isascii() and words[1].isdecimal()):
        return None
    return int(words[1][:20]), words[2:]


class PeerSource:
    """A checkpoint that the ranks of another job serve.

    Args:
        step: the step of the publication
        urls: the URLs of all ranks; the first one serves the index
        network: the secret that the ranks have to prove, and whether shared memory may replace the network
        timeout: seconds from now until the deadline of all reads together
        lanes: connections; ``None`` chooses by the number of cores
    """

    def __init__(self, step: int, urls: Sequence[str], network: Network, *, timeout: float, lanes: int | None) -> None:
        self._step = step
        self._urls = urls
        self._deadline = time.monotonic() + timeout
        self._lanes = lanes
        self._network = network
        self._first: dict[str, int] | None = None
        self._relay: Server | None = None
        self._shared: Collection[str] = ()

    @property
    def is_encrypted(self) -> bool:
        """Whether one of the ranks encrypts what it serves."""
        return any(is_encrypted(url) for url in self._urls)

    def share(self, containers: Collection[str], relay: Server | None) -> None:
        """Has this process and others that read the same slices of ``containers`` bring them to each other.

        Args:
            containers: names of containers
            relay: serves on what a read brings, until that returns; ``None`` ends it
        """
        self._shared, self._relay = containers, relay

    def containers(self) -> list[str]:
        """Returns the names of the containers of all ranks."""
        return [container_name(self._step, url) for url in self._urls]

    def open(self, container: str) -> Remote:
        """Opens a container, whose control entries are then there; the caller closes it.

        Raises:
            TensorferryError: as for ``HTTPTransport.recv_checkpoint``
        """
        return Remote.open(
            [url_of(container)], self._step, timeout=self._seconds_left(), lanes=1, **self._network.receive_options()
        )

    @property
    def serves_states(self) -> bool:
        """Whether the first rank serves a state, and no part of a distributed checkpoint.

        Raises:
            TensorferryError: as for ``HTTPTransport.recv_checkpoint``
        """
        names = self._first_entries()
        return reserved.INDEX not in names and reserved.MANIFEST in names

    def _first_entries(self) -> dict[str, int]:
        """Returns name and length of each entry of the first rank's container."""
        if self._first is None:
            with contextlib.closing(self.open(self.containers()[0])) as remote:
                self._first = dict(zip(remote.names, remote.sizes, strict=True))
        return self._first

    def read_index(self) -> bytes:
        """Fetches the index from the first rank.

        Raises:
            ProtocolError: the rank serves no index
            SystemRefused: this machine does not have as much memory as the index needs
            TensorferryError: as for ``HTTPTransport.recv_checkpoint``
        """
        url = self._urls[0]
        sizes = self._first_entries()
        if reserved.INDEX not in sizes:
            raise ProtocolError(f"{url} serves no index of a distributed checkpoint")
        nbytes = sizes[reserved.INDEX]
        _check_machine_has(nbytes, "the index")
        memory: Any = Arena([nbytes]).part(0)
        if memory is None:
            return b""
        whole: SliceTuple = (reserved.INDEX, "U8", nbytes, 0, nbytes, memory.address, [])
        self.read({container_name(self._step, url): [whole]})
        return bytes(memory)

    def read(self, slices: Mapping[str, list[SliceTuple]], progress: Progress | None = None) -> Mapping[str, int]:
        """Fetches slices to their memory addresses, from several ranks at a time.

        Args:
            slices: the slices by :func:`container_name`
            progress: as for :meth:`Source.read`

        Returns:
            ``bytes`` that were fetched, of these ``relayed``, those that other readers have sent, and ``wanted``, those
            of the slices, and ``retries``.

        Raises:
            ProtocolError: a container is not one of this publication, or contradicts the slices
            TensorferryError: as for ``HTTPTransport.recv_checkpoint``
        """
        requests = []
        for container, of_container in slices.items():
            step, _, url = container.partition(" ")
            if url not in self._urls or not (step.isascii() and step.isdecimal() and len(step) < 19):
                raise ProtocolError("the index names a source that the metadata does not")
            requests.append(([url], int(step), of_container))
        report = _fetch_slices(
            requests,
            timeout=self._seconds_left(),
            lanes=self._lanes,
            ahead=AHEAD,
            progress=progress,
            relay=self._relay,
            shared={number for number, container in enumerate(slices) if container in self._shared},
            **self._network.receive_options(),
        )
        for source, trouble in report.troubles.items():
            logger.warning("slices from %s were fetched over other connections: %s", source, trouble)
        return {
            "bytes": report.bytes,
            "relayed": report.relayed,
            "wanted": report.wanted,
            "retries": report.retries,
        }

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())
