"""The metadata strings of sources: joins several into one, and selects the sources that a receiver may use."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from .. import _validate
from ..errors import InvalidArgument, UnprovenSource

logger = logging.getLogger("tensorferry")

#: Scheme, what stands before an @, and host and port.
_PINNED = re.compile(r"(https?)://(?:([^/@\s]*)@)?([^/@\s]*)")
_FINGERPRINT = re.compile(r"sha256-[0-9a-f]{64}")
#: How many characters of a host a message repeats.
_SHOWN = 200
#: Most hosts that are named of several sources.
_MOST_HOSTS = 3
_WHOLE = (
    "give the whole string, https://sha256-...@host:port/..., as metadata() of the source returns it, or as "
    "`tensorferry serve` or `tensorferry keeper --status` prints it"
)
#: The form of what ``metadata()`` returns.
_METADATA = re.compile(r"(http://|https://sha256-[0-9a-f]+@)[^/@]+/(\S+/)?")


def join_metadata(metadata: Iterable[str]) -> str:
    """Joins the metadata of several sources that hold the same state into one string.

    A receiver fetches ranges from all of them, more from the faster ones, and goes on with the others when one dies or
    turns out to serve another state. The order does not matter.

    Args:
        metadata: what ``metadata()`` of each source's transport returned; metadata of torchft's own transport cannot be
            joined

    Raises:
        InvalidArgument: ``metadata`` is empty, or an item is not the metadata of a tensorferry transport
    """
    given = _validate.items("metadata", metadata)
    urls = [url for joined in given for url in _validate.string("each metadata", joined).split()]
    for url in urls:
        check_fingerprint(url)
        if not _METADATA.fullmatch(url) or is_stock(url):
            raise InvalidArgument(
                f"{_validate.brief(url)} is not the metadata of a tensorferry transport, which is a URL such as "
                "http://node1:29600/5f0c.../checkpoint/: pass what metadata() returns there"
            )
    if not urls:
        raise InvalidArgument("metadata is empty: pass what metadata() of a source has returned")
    return " ".join(dict.fromkeys(urls))


def host_of(url: str) -> str:
    """Returns the host and port of ``url``, without the random path, which grants access."""
    return url.partition("//")[2].rpartition("@")[2].partition("/")[0]


def hosts_of(sources: Sequence[str]) -> str:
    """Returns the hosts and ports of ``sources``, without their random paths: the first three."""
    hosts = [host_of(source)[:_SHOWN] for source in sources]
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return (", ".join(hosts[:_MOST_HOSTS]) or "no source") + more


def check_fingerprint(url: str) -> None:
    """Checks that a URL has the fingerprint of a certificate if, and only if, it encrypts.

    Raises:
        InvalidArgument: it has one too few, one too many, or something else in its place; the message names the host
            and not the random path
    """
    found = _PINNED.match(url)
    if found is None:
        return
    scheme, pinned, place = found.groups()
    if scheme == "https" and pinned is None:
        raise InvalidArgument(
            f"https://{place[:_SHOWN]} comes without the fingerprint of its certificate, without which nobody can tell "
            f"whose it is: {_WHOLE}"
        )
    if scheme == "https" and not _FINGERPRINT.fullmatch(pinned):
        raise InvalidArgument(
            f"what https://{place[:_SHOWN]} has before the @ is not the fingerprint of a certificate, sha256- and 64 "
            f"hexadecimal digits: {_WHOLE}"
        )
    if scheme == "http" and pinned is not None:
        raise InvalidArgument(
            f"http://{place[:_SHOWN]} does not encrypt, and comes with the fingerprint of a certificate: {_WHOLE}"
        )


def is_stock(metadata: str) -> bool:
    """Whether ``metadata`` comes from torchft's own transport, whose URL path has no random part.

    A request to the source would show it as well, but torchft logs a traceback for every path it does not know.
    """
    try:
        url = urlsplit(metadata)
        return url.path == "/checkpoint/" and url.scheme == "http" and bool(url.hostname) and url.port != 0
    except ValueError:  # Not a URL: the native client raises an error that says what is wrong with it.
        return False


def is_encrypted(source: str) -> bool:
    """Whether the connections to ``source``, one of the URLs in a metadata string, use TLS."""
    return source.startswith("https://")


def encrypted(sources: list[str]) -> list[str]:
    """Returns the sources that encrypt, and logs a warning for each of the others.

    Raises:
        UnprovenSource: there are sources, and none of them encrypts
    """
    plain = [source for source in sources if not is_encrypted(source)]
    if plain and len(plain) == len(sources):
        raise UnprovenSource(
            f"{_host(plain[0])} does not encrypt, and with tls=True only sources that do are fetched from: start "
            "the source with tls=True as well, or receive without it. Stock torchft sources never encrypt: while "
            "a fleet is upgraded replica by replica, run it without tls"
        )
    for source in plain:
        logger.warning("%s does not encrypt and is left out: this receiver has tls=True", _host(source))
    return [source for source in sources if source not in plain]


def require_encrypted(ranks: Sequence[str]) -> None:
    """Checks that all ``ranks`` encrypt, of which no other one serves what one does.

    Raises:
        UnprovenSource: one does not
    """
    for rank, url in enumerate(ranks):
        if not is_encrypted(url):
            raise UnprovenSource(
                f"rank {rank}, at {host_of(url)}, does not encrypt, and with TLS all ranks have to: start its source "
                "with tls=True, or receive without TENSORFERRY_TLS"
            )


def _host(source: str) -> str:
    """Returns a source's host and port, without the random path in its metadata that grants access."""
    return source.partition("//")[2].partition("/")[0] or source[:40]
