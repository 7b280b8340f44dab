"""The list of a keeper's snapshots for other keepers: a container with one entry, served beside them.

The list is fetched and verified like any checkpoint, so it is protected like one. With a shared secret its path is
the same for every keeper, and ``host:port`` is enough of an address; without one the path holds random bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from ... import _validate
from ..._native import Remote, Secret, Shelf, Table
from ..._settings import SECRET, SECRET_FILE
from ...errors import InvalidArgument, ProtocolError, SourceRefused, message_of
from ...net.metadata import host_of
from ...net.options import ServerOptions
from ...storage.container import Container
from ...storage.reserved import PREFIX
from .snapshot import Snapshot, snapshot

#: The path of the list where a secret protects it.
NAME = "keeper"
#: The step the list is served as, however often it changes.
STEP = 0
#: Most partners of a keeper.
MOST_BUDDIES = 16
_ENTRY = f"{PREFIX}keeper"
_VERSION = 2
#: Longest list that is read, in bytes; the most values in one, by which its memory is bounded; and the most snapshots.
_LONGEST = 16 << 20
_MOST_VALUES = 1 << 16
_MOST = 1024
_URL = re.compile(r"(http://|https://sha256-[0-9a-f]+@)[^\s/@]+/[A-Za-z0-9]+/checkpoint/")
#: A keeper whose certificate was known before it started.
_PINNED = re.compile(r"https://(sha256-[0-9a-f]{64})@([^\s/@]+)/?")
_FINGERPRINT = (
    "tensorferry keeper --fingerprint FILE prints that of the certificate in a file, which a keeper uses with "
    "--certificate; tensorferry keeper --status prints the whole address of one that runs there"
)
_TOKEN = re.compile(r"[a-z]+://[^\s/]+/([0-9A-Za-z]+)/checkpoint/")
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s/@:]+):[0-9]{1,5}")


def keeper_url(address: str, options: ServerOptions) -> str:
    """Returns the URL of the list of the keeper at ``address``.

    Args:
        address: such a URL; or, where there is a secret, ``host:port``, with TLS
            ``https://sha256-<fingerprint>@host:port``
        options: the secret of this keeper, and whether it encrypts

    Raises:
        InvalidArgument: it is neither, or does not encrypt though ``options`` ask for TLS
    """
    text = _validate.string("the address of a keeper", address).strip()
    if _URL.fullmatch(text):
        if options.tls and not text.startswith("https://"):
            raise InvalidArgument(f"{host_of(text)} does not encrypt, and this keeper has TLS: start both with --tls")
        return text
    pinned = _PINNED.fullmatch(text)
    place = pinned[2] if pinned else text
    if not pinned and re.match(r"https://[^@]*$", text):
        raise InvalidArgument(
            f"{_validate.brief(text)} comes without the fingerprint of its certificate: {_FINGERPRINT}"
        )
    if not _HOST_AND_PORT.fullmatch(place):
        raise InvalidArgument(
            f"{_validate.brief(address)} is not the address of a keeper: give what tensorferry keeper --status prints "
            "there, or host:port where both have the same secret"
        )
    if options.secret is None:
        raise InvalidArgument(
            f"{text} is enough of an address only where both keepers have the same secret, and neither {SECRET} nor "
            f"{SECRET_FILE} is set here. Set one of them, or give what tensorferry keeper --status prints there"
        )
    if pinned:
        return f"https://{pinned[1]}@{place}/{NAME}/checkpoint/"
    if options.tls:
        raise InvalidArgument(
            f"{text} is not enough of an address: TLS needs the fingerprint of the certificate there, as in "
            f"https://sha256-...@{text}. {_FINGERPRINT}"
        )
    return f"http://{place}/{NAME}/checkpoint/"


def publish(shelf: Shelf, snapshots: Sequence[Snapshot]) -> None:
    """Serves the list of ``snapshots``, in place of the one before."""
    described = [one.fields() for one in snapshots]
    text = json.dumps({"version": _VERSION, "snapshots": described}, separators=(",", ":")).encode()
    Container(Table(), None, True, [(_ENTRY, text)]).publish(shelf, STEP)


def fetch(url: str, timeout: float, secret: Secret | None, same_host: bool) -> list[Snapshot]:
    """Returns the list of the keeper at ``url``.

    Raises:
        ProtocolError: what is served there is no such list
        TensorferryError: it cannot be fetched
    """
    remote = Remote.open(
        [url], STEP, timeout=timeout, lanes=1, same_host=same_host, secret=secret, most_described=2 * _LONGEST
    )
    try:
        if len(remote) != 1 or remote.names != [_ENTRY] or not 0 < remote.size(0) <= _LONGEST:
            raise ProtocolError(f"{host_of(url)} serves no list of snapshots: it is not a keeper")
        arena, _ = remote.fetch()
        text = bytes(memoryview(arena.part(0)))  # type: ignore[arg-type]  # a buffer, which 3.11 has no type for
    finally:
        remote.close()
    if sum(text.count(begins) for begins in (b",", b"[", b"{")) > _MOST_VALUES:
        raise ProtocolError(f"the list of {host_of(url)} has more values than one of {_MOST} snapshots")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"the list of {host_of(url)} cannot be read: {e}") from e
    if not isinstance(found, dict) or found.get("version") != _VERSION or not isinstance(found.get("snapshots"), list):
        raise ProtocolError(f"{host_of(url)} runs another version of the keeper: nothing is copied between the two")
    return [_beside(url, snapshot(one)) for one in found["snapshots"][:_MOST]]


def _beside(url: str, about: Snapshot) -> Snapshot:
    """Returns ``about`` with a URL on the very server that listed it, by the host under which that was reached."""
    if not (token := _TOKEN.fullmatch(about.metadata)):
        raise ProtocolError(f"the list of {host_of(url)} has a snapshot without an address")
    scheme, _, rest = url.partition("//")
    return replace(about, metadata=f"{scheme}//{rest.partition('/')[0]}/{token[1]}/checkpoint/")


def message_about(url: str, error: BaseException) -> str:
    """Returns what ``error`` says of the keeper at ``url``, without the step as which its list is served."""
    if isinstance(error, SourceRefused) and error.code == 404 and url.endswith(f"/{NAME}/checkpoint/"):
        # This path stays the same: a keeper that was started again has it, too.
        return "not found: the keeper there has another shared secret than this one, or none"
    message, host = message_of(error), host_of(url)
    return message.removeprefix(f"step {STEP} from {host}: ").removeprefix(f"{host}: ")
