"""What the client's library tells of a request that has failed, as errors of this package.

Its message ends with a dump of its own structures, which alone names the cause of a lost connection. What is told has
no URL but the address of the server: a path or a query may hold what is secret.
"""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

from ...errors import (
    ConnectError,
    FetchTimeout,
    IncompleteCheckpoint,
    SourceChanged,
    StoreRefused,
    SystemRefused,
)
from .url import without_secrets

if TYPE_CHECKING:
    from .client import Client

#: Where the library's messages begin to tell of its own structures.
DEBUG = "\n\nDebug source:"
#: The status with which a store says that it does not have what a request asks for.
NOT_IMPLEMENTED = 501
_LONGEST = 600
_FORBIDDEN = "the store does not permit it"
#: Which of the library's classes the builtin ones stand for that it raises instead.
_BUILTIN: dict[type[BaseException], str] = {
    FileNotFoundError: "NotFoundError",
    FileExistsError: "AlreadyExistsError",
    PermissionError: "PermissionDeniedError",
    NotImplementedError: "NotImplementedError",
}
#: What is refused by the system of this machine, and how Python says that it can start no thread.
_OF_SYSTEM = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_NO_THREAD = "can't start new thread"
_NO_BUCKET = re.compile(r"\b(?:NoSuchBucket|ContainerNotFound|The specified bucket does not exist)\b")
_PART = re.compile(r"[?&](?:partNumber|partnumber)=(\d{1,6})|[?&]blockid=")
_STATUS = re.compile(r"\b(?:status|status code|Server returned [a-z -]*error[a-z ]*)\W{1,3}(\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z0-9._-]{1,80})</Code>")
_SAID = re.compile(r"<Message>([^<]{1,300})</Message>")
_LOST = re.compile(
    r"error sending request|HTTP error: (?:connection|request) error|connection (?:refused|reset|closed)"
    r"|client error \(Connect\)|response body error|error decoding response body|unexpected eof|dns error"
    r"|error trying to connect|IncompleteMessage|tcp connect",
    re.IGNORECASE,
)
_SLOW = re.compile(r"operation timed out|HTTP error: timeout|\btimed out\b", re.I)
#: The address in a message of the library, which may be that of a server for credentials.
_ADDRESS = re.compile(r"Error performing [A-Z]+ ([a-z]+://[^/\s?#]+)")
#: The innermost words of a cause, which are the last ones; and how the dump tells of a certificate, and of no TLS.
_CAUSE = re.compile(r'(?:message|error): "([^"]{1,200})"')
_TLS = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?([A-Za-z]{1,40})|(InvalidMessage)\(")
_CHECK = (
    "Check the endpoint (AWS_ENDPOINT_URL: https:// or http://), the credentials (AWS_ACCESS_KEY_ID), and the "
    "authority of its certificate (AWS_CA_BUNDLE), or store_options"
)


class Unsupported(StoreRefused):
    """The store says that it does not have what a request asks for, such as conditional writes."""


def kind_of(error: BaseException) -> str | None:
    """Returns the name of the library's class of an error; ``None`` for any other error."""
    kind = next((c.__name__ for c in type(error).__mro__ if c.__module__.startswith(("obstore", "pyo3"))), None)
    return _BUILTIN.get(type(error), kind)


def status_of(error: BaseException) -> int | None:
    """Returns the status in an answer of the store, by the library's own words; ``None`` without one."""
    # Behind them comes what the store has sent.
    found = _STATUS.search(_without_urls(str(error).partition(DEBUG)[0]))
    return None if found is None else int(found[1])


def is_missing(error: Exception) -> bool:
    """Whether a request has failed because there is no such object."""
    return isinstance(error, IncompleteCheckpoint) and str(error).endswith("there is no such object")


def is_forbidden(error: StoreRefused) -> bool:
    """Whether the store does not permit a request, as some say of what is missing."""
    return f": {_FORBIDDEN}: " in str(error)


def is_not_found(error: Exception) -> bool:
    """Whether the client's library says that there is no such object."""
    return kind_of(error) == "NotFoundError"


def translated(
    error: Exception, name: str, what: str, *, client: Client | None, seconds: float, left: float
) -> Exception | None:
    """Returns the error of this package for one of the client's library, or for lack of time; ``None`` for others.

    Errors that say that this process has no memory, descriptor or thread are among them.

    Args:
        error: what a request has raised
        name: the URL of the object
        what: what was done
        client: that of the bucket
        seconds: how long the operation might take
        left: how long it still may take
    """
    at = client.endpoint if client is not None and client.endpoint else "its address"
    late = f"was not over within {seconds:g} s"
    if isinstance(error, TimeoutError):
        return FetchTimeout(
            f"{name}: {what}: the store at {at} has sent nothing for too long"
            if left > 0
            else f"{name}: {what} {late}; the store is at {at}"
        )
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in _OF_SYSTEM or str(error) == _NO_THREAD:
        return SystemRefused(f"{name}: {what}: {error or 'there is no memory'}")
    if (kind := kind_of(error)) is None:
        return None
    # Some messages name the key, whose words say nothing.
    key = name.partition("://")[2].partition("/")[2]
    text = re.sub(rf"\b(location|path) {re.escape(key)}(?=[ :])", r"\1", str(error), count=1) if key else str(error)
    where, said = f"{name}{part_of(text)}", what_was_said(text)
    match kind:
        case "NotFoundError":
            if _NO_BUCKET.search(said):
                return StoreRefused(f"{where}: {what}: the store at {at} has no such bucket: {said}")
            return IncompleteCheckpoint(f"{where}: there is no such object")
        case "PermissionDeniedError" | "UnauthenticatedError":
            return StoreRefused(
                f"{where}: {what}: {_FORBIDDEN}: {said}. Check the credentials in the environment, and "
                f"what they may do with this bucket at {at}"
            )
        case "PreconditionError" | "AlreadyExistsError" | "NotModifiedError":
            return SourceChanged(f"{where}: {what}: another writer has changed it meanwhile")
        case "RustPanic" | "PanicException":
            return StoreRefused(f"{where}: {what}: the client has failed, as it does for options that it cannot use")
    asked = at if (address := _ADDRESS.search(text)) is None else without_secrets(address[1])
    if status_of(error) is None and (_LOST.search(said) or _SLOW.search(said)):
        reason = f"the store cannot be reached at {asked}: {_cause_of(text)}. {_CHECK}"
        if left <= 0:
            return FetchTimeout(f"{where}: {what} {late}; {reason}")
        return (FetchTimeout if _SLOW.search(said) else ConnectError)(f"{where}: {what}: {reason}")
    if left <= 0:
        return FetchTimeout(f"{where}: {what} {late}; the store said last: {said}")
    # The library has no class for what a store does not have.
    is_unsupported = kind in ("NotSupportedError", "NotImplementedError") or status_of(error) == NOT_IMPLEMENTED
    return (Unsupported if is_unsupported else StoreRefused)(f"{where}: {what}: the store at {asked} refuses: {said}")


def _cause_of(text: str) -> str:
    """Returns why a server does not answer."""
    if tls := _TLS.search(text):
        return f"its certificate is not accepted ({tls[1]})" if tls[1] else "it does not speak TLS"
    causes = _CAUSE.findall(text)
    return causes[-1] if causes else "it does not answer" if "TimedOut" in text else what_was_said(text)


def part_of(text: str) -> str:
    """Returns which part of an object a message of the client is about, for a message; empty if it says none."""
    found = _PART.search(text)
    return f", part {found[1]}" if found is not None and found[1] else ""


def what_was_said(text: str) -> str:
    """Returns what the client tells of an answer, on one line and without URLs."""
    code, said = _CODE.search(text), _SAID.search(text)
    text = text.partition(DEBUG)[0]
    status = _STATUS.search(_without_urls(text))
    if code is not None:
        told = f"{code[1]}{f' ({without_secrets(said[1].strip())})' if said else ''}"
        return f"status {status[1]}, {told}" if status else told
    return " ".join(_without_urls(text).split())[:_LONGEST]


def _without_urls(text: str) -> str:
    """Returns ``text`` without any URL, whose words say nothing about an error."""
    return re.sub(r"[a-zA-Z][a-zA-Z0-9+.-]{0,20}://[^\s\"'<>)]*", "the store", text)
