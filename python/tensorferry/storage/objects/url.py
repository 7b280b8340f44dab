"""The URLs of object stores: which are taken, and how messages show them, without what may be secret."""

from __future__ import annotations

import re
from typing import NamedTuple

from ...errors import InvalidArgument

#: The schemes of stores, as the client's library knows them.
SCHEMES = frozenset({"s3", "s3a", "gs", "az", "adl", "abfs", "abfss", "azure"})
#: Schemes whose URLs may name a container before the account's host.
_CONTAINER_AT_HOST = frozenset({"abfs", "abfss"})
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
#: The part of any URL in a text that may hold credentials: what is before the host, and the query.
_SECRETS = re.compile(
    r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)(?:[^/\s\"'<>@]*@)?(?P<rest>[^\s\"'<>?#]*)(?:[?#][^\s\"'<>]*)?"
)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class StoreUrl(NamedTuple):
    """A URL in its parts.

    Attributes:
        root: the URL of the bucket
        key: the key of the object or the folder, without slashes at its ends
    """

    root: str
    key: str

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root


def scheme_of(text: object) -> str | None:
    """Returns the scheme of a URL, in lower case; ``None`` if ``text`` is none."""
    found = _URL.match(text) if isinstance(text, str) else None
    return None if found is None else found["scheme"].lower()


def is_store(text: object) -> bool:
    """Whether ``text`` is the URL of a place in an object store."""
    return scheme_of(text) in SCHEMES


def parsed(text: str, name: str = "path") -> StoreUrl:
    """Returns the parts of the URL of a place in a store.

    Args:
        text: the URL
        name: the name of the argument, for messages

    Raises:
        InvalidArgument: it is no such URL, names no bucket, has a user, a password, a query or a fragment, or its key
            has empty names, dots alone, control characters or halves of surrogate pairs
    """
    found = _URL.match(text)
    if found is None or found["scheme"].lower() not in SCHEMES:
        raise InvalidArgument(f"{name} must be the URL of a place in an object store, not {without_secrets(text)!r}")
    scheme = found["scheme"].lower()
    host, _, key = found["rest"].partition("/")
    shown = without_secrets(text)
    container, at, account = host.rpartition("@")
    if at and not (scheme in _CONTAINER_AT_HOST and _BUCKET.fullmatch(container)):
        raise InvalidArgument(
            f"{shown}: {name} must have no user or password: stores take credentials from the environment, or from "
            "store_options="
        )
    if "?" in text or "#" in text:
        raise InvalidArgument(
            f"{shown}: {name} must have no query and no fragment: what stands behind its first ? or # is not shown "
            "here, and no key can have one of these"
        )
    if not _BUCKET.fullmatch(account):
        raise InvalidArgument(f"{shown}: {name} names no bucket")
    key = key.strip("/")
    parts = key.split("/") if key else []
    if any(part in ("", ".", "..") or any(_is_no_text(c) for c in part) for part in parts):
        raise InvalidArgument(
            f"{shown!r}: {name} must have no empty names, no dots alone, no control characters, and no halves of "
            "surrogate pairs"
        )
    return StoreUrl(f"{scheme}://{host}", key)


def _is_no_text(character: str) -> bool:
    return ord(character) < 32 or ord(character) == 127 or 0xD800 <= ord(character) < 0xE000


def without_secrets(text: str) -> str:
    """Returns ``text`` with all URLs in it shown without users, passwords and queries."""
    return _SECRETS.sub(lambda found: found["scheme"] + found["rest"], text)
