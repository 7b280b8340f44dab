"""Running peers, as the command line names them: their metadata, the step they serve, and an opened container."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .. import _validate
from .._native import Remote, Server
from ..errors import InvalidArgument, SourceChanged, UnprovenSource, WrongStep
from ..net.certificates import wants_tls
from ..net.metadata import encrypted, hosts_of, is_encrypted, is_stock, join_metadata
from ..net.options import wants_same_host
from ..net.secret import shared_secret
from ..storage import peers

#: Seconds that a receive may take, unless ``--timeout`` says otherwise.
TIMEOUT = 600.0
#: A refusal because of the step, by a source that has gone on to another one.
_SERVED = re.compile(r"serving -?\d{1,19} but got")
#: How often a source may go on to another step between two requests.
_ATTEMPTS = 3


def is_metadata(text: str) -> bool:
    """Whether an argument names running peers, and not a file."""
    return text.startswith(("http://", "https://", f"{peers.SCHEME} "))


def refuse_without_peers(texts: Sequence[str], step: int | None, timeout: float) -> None:
    """Refuses the options for peers where none is named.

    Raises:
        InvalidArgument: one was given
    """
    if not any(map(is_metadata, texts)) and (step, timeout) != (None, TIMEOUT):
        raise InvalidArgument("--step and --timeout are for running peers")


@dataclass(frozen=True)
class Peers:
    """The peers that the metadata names.

    Attributes:
        urls: of all sources of a state; or of all ranks of a publication, the one with the index first
        step: the step that the metadata names, if it names one
        are_ranks: whether the peers are the ranks of a ``PeerWriter``'s publication
    """

    urls: list[str]
    step: int | None = None
    are_ranks: bool = False

    @classmethod
    def of(cls, metadata: Sequence[str]) -> Peers:
        """Returns the peers that arguments of the command line name.

        Raises:
            InvalidArgument: they are not the metadata of tensorferry's peers
            UnprovenSource: the environment asks for encryption, and no source encrypts, or one of the ranks does not
        """
        text = " ".join(metadata)
        ranks = peers.parse_publication(text)
        if ranks is not None:
            found = cls(ranks[1], _validate.step_number(ranks[0]), True)
        elif is_stock(text.strip()):
            raise InvalidArgument(
                "this is the metadata of torchft's own transport, which serves no container: receive from it with "
                "an HTTPTransport of tensorferry"
            )
        else:
            found = cls(join_metadata(metadata).split())
        if not wants_tls(None):
            return found
        # No other rank serves what this one does.
        plain = next((n for n, url in enumerate(found.urls) if found.are_ranks and not is_encrypted(url)), None)
        if plain is not None:
            raise UnprovenSource(
                f"rank {plain}, at {hosts_of([found.urls[plain]])}, does not encrypt, and with TLS all ranks have to: "
                "start its source with tls=True, or receive without TENSORFERRY_TLS"
            )
        return replace(found, urls=encrypted(found.urls))


def open_source(
    urls: list[str],
    step: int | None,
    timeout: float,
    progress: Callable[[int, int], object] | None = None,
    relay: Server | None = None,
) -> tuple[Remote, int]:
    """Opens what the sources of a state serve.

    Args:
        urls: the sources
        step: the step to open; ``None`` takes the one that is served
        timeout: seconds for the whole receive
        progress: called with the number of bytes that have arrived and the number of all bytes
        relay: serves on what has come, where the source offers that

    Returns:
        What was opened, for the caller to close, and its step.

    Raises:
        InvalidArgument: ``step`` or the secret cannot be used
        SourceChanged: without ``step``, the source has gone on to another one again and again
        TensorferryError: as for ``HTTPTransport.recv_checkpoint``
    """
    if step is not None:
        step = _validate.step_number(step)
    deadline = time.monotonic() + timeout
    for _ in range(_ATTEMPTS):
        try:
            remote = Remote.open(
                urls,
                step,
                timeout=max(deadline - time.monotonic(), 0.0),
                lanes=None,
                same_host=wants_same_host(None),
                progress=progress,
                secret=shared_secret(None),
                relay=relay,
            )
        except WrongStep as e:
            if step is not None or not _SERVED.search(str(e)):
                raise
            # It has gone on between saying which step it serves and the request for that.
            continue
        return remote, remote.step
    raise SourceChanged("the source goes on to other steps faster than one can be opened: name one with --step")
