"""The metadata strings of sources: joins several into one, and selects the sources that a receiver may use."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from .. import _validate
from ..errors import InvalidArgument, UnprovenSource

logger = logging.getLogger("tensorferry")

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
        if not _METADATA.fullmatch(url) or is_stock(url):
            raise InvalidArgument(f"{_validate.brief(url)} is not the metadata of a tensorferry transport")
    if not urls:
        raise InvalidArgument("metadata is empty: pass what metadata() of a source has returned")
    return " ".join(dict.fromkeys(urls))


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
            f"{_host(plain[0])} does not encrypt, and a transport with tls=True fetches only from sources that do: "
            "start the source with tls=True as well, or receive without it. Stock torchft sources never encrypt: while "
            "a fleet is upgraded replica by replica, run it without tls"
        )
    for source in plain:
        logger.warning("%s does not encrypt and is left out: this transport has tls=True", _host(source))
    return [source for source in sources if source not in plain]


def _host(source: str) -> str:
    """Returns a source's host and port, without the random path in its metadata that grants access."""
    return source.partition("//")[2].partition("/")[0] or source[:40]
