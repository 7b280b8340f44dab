"""Uploads in parts that nobody has completed: stores keep their parts, and bill them, until somebody ends them.

The client's library neither lists nor ends them, so that is done here, for S3 and what speaks its protocol, with keys
that are given in options or the environment. Without such keys, as with the role of a machine, and in other stores, a
lifecycle rule of the bucket has to do it.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from . import settings
from .place import ObjectPlace
from .url import without_secrets

if TYPE_CHECKING:
    import urllib.request

logger = logging.getLogger("tensorferry")

#: Seconds without an answer, the most bytes of one, and how many lists of uploads are looked at.
_PATIENCE_S, _MOST, _PAGES = 10.0, 8 << 20, 20
#: Seconds in which an address that could not be reached is not asked again, and until when each is not.
_PAUSE_S = 600.0
_unreachable: dict[str, float] = {}
_UPLOAD = re.compile(r"<Upload>(.{1,20000}?)</Upload>", re.DOTALL)


@dataclass(frozen=True)
class Begun:
    """An upload that was begun and neither completed nor ended.

    Attributes:
        name: of the object that it would make
        id: by which the store knows it
        began: when it began, in seconds since the epoch, by the clock of the store
    """

    name: str
    id: str
    began: float


@dataclass(frozen=True)
class _Access:
    """The address of a bucket, the keys to it, and the options of the client."""

    base: str
    region: str
    key: str
    secret: str
    token: str | None
    client: Mapping[str, Any]


def listed(folder: ObjectPlace) -> list[Begun]:
    """Returns the uploads to objects directly in ``folder``; none where that cannot be known.

    That is so, too, if the store cannot be reached, does not answer in time, or does not list them.

    Raises:
        TransferCancelled: the operation was ended
        ForkedProcess: requests were made before this process was forked
    """
    access = _access(folder)
    if access is None:
        return []
    prefix = f"{folder.key}/" if folder.key else ""

    def asked() -> list[Begun]:
        found: list[Begun] = []
        marker: dict[str, str] = {}
        for _ in range(_PAGES):
            status, text = _request(access, "GET", "", {"uploads": "", "prefix": prefix, **marker})
            if status != 200:
                logger.debug("%s: the store does not list uploads (status %d)", folder, status)
                return []
            for match in _UPLOAD.finditer(text):
                name = _field(match[1], "Key").removeprefix(prefix)
                if name and "/" not in name:
                    found.append(Begun(name, _field(match[1], "UploadId"), _time(_field(match[1], "Initiated"))))
            if _field(text, "IsTruncated") != "true":
                return found
            marker = {
                "key-marker": _field(text, "NextKeyMarker"),
                "upload-id-marker": _field(text, "NextUploadIdMarker"),
            }
        return found

    import asyncio

    try:
        return folder.calls().call(lambda: asyncio.to_thread(asked), str(folder), "listing uploads")
    except OSError as e:
        logger.debug("%s: uploads cannot be listed: %s", folder, e)
        return []


def abort(folder: ObjectPlace, begun: list[Begun]) -> None:
    """Ends uploads to objects in ``folder``, and removes their parts; logs what cannot be ended.

    Nothing is done where :func:`listed` cannot know them.

    Raises:
        TransferCancelled: the operation was ended
        ForkedProcess: requests were made before this process was forked
    """
    access = _access(folder)
    if access is None or not begun:
        return

    def asked() -> None:
        for one in begun:
            status, _ = _request(access, "DELETE", (folder / one.name).key, {"uploadId": one.id})
            if status not in (200, 204, 404):
                logger.warning("%s/%s: an upload that was left cannot be ended (status %d)", folder, one.name, status)

    import asyncio

    try:
        folder.calls().call(lambda: asyncio.to_thread(asked), str(folder), "ending uploads")
    except OSError as e:
        logger.warning("%s: uploads that were left cannot be ended: %s", folder, e)


def _access(place: ObjectPlace) -> _Access | None:
    """Returns how to reach the bucket of ``place`` without the library; ``None`` if that is not known."""
    scheme, _, bucket = place.url.root.partition("://")
    if scheme not in settings.SCHEMES:
        return None
    if "credential_provider" in place.options:
        # The keys of the environment may be those of somebody else.
        return None
    known = settings.of_s3(place.options)
    if "key" not in known or "secret" not in known:
        return None
    region = known.get("region", "us-east-1")
    virtual = known.get("virtual_hosted", "").lower() in ("true", "1")
    if endpoint := known.get("endpoint", "").rstrip("/"):
        base = endpoint if virtual else f"{endpoint}/{bucket}"
    else:
        base = (
            f"https://{bucket}.s3.{region}.amazonaws.com" if virtual else f"https://s3.{region}.amazonaws.com/{bucket}"
        )
    client = place.options.get("client_options") or {}
    return _Access(base, region, known["key"], known["secret"], known.get("token"), client)


def _request(access: _Access, method: str, key: str, query: dict[str, str]) -> tuple[int, str]:
    """Makes a signed request; returns the status and the body, of which there may only be so much.

    It takes the proxy of ``client_options``, or that of the environment, as the library does. An address that could not
    be reached is not asked again for a while: every commit would wait for it.

    Raises:
        OSError: the store cannot be reached, or could not a short time ago
    """
    # Heavy, and seldom needed.
    import http.client
    import urllib.error
    import urllib.request

    if time.monotonic() < _unreachable.get(access.base, 0.0):
        raise OSError("it could not be reached a short time ago")
    url = urlsplit(access.base)
    path = quote(f"{url.path}/{key}" if key else url.path or "/", safe="/-_.~")
    text = "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(query.items()))
    headers = _signed(access, method, url.netloc, path, text)
    request = urllib.request.Request(f"{url.scheme}://{url.netloc}{path}?{text}", headers=headers, method=method)
    try:
        with _opener(access.client).open(request, timeout=_PATIENCE_S) as answer:
            return answer.status, answer.read(_MOST).decode(errors="replace")
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read(_MOST).decode(errors="replace")
    except (OSError, http.client.HTTPException) as e:
        _unreachable[access.base] = time.monotonic() + _PAUSE_S
        raise OSError(f"{type(e).__name__}: {without_secrets(str(e))}") from None


def _opener(client: Mapping[str, Any]) -> urllib.request.OpenerDirector:
    """Returns what makes requests with these options of the client, as far as they are about proxies and trust."""
    import ssl
    import urllib.request

    trust = ssl.create_default_context()
    for name in ("root_certificate", "proxy_ca_certificate"):
        if certificate := client.get(name):
            trust.load_verify_locations(
                cadata=certificate.decode() if isinstance(certificate, bytes) else str(certificate)
            )
    proxy = client.get("proxy_url")
    through = urllib.request.ProxyHandler({"http": str(proxy), "https": str(proxy)} if proxy else None)
    return urllib.request.build_opener(through, urllib.request.HTTPSHandler(context=trust))


def _signed(access: _Access, method: str, host: str, path: str, query: str) -> dict[str, str]:
    """Returns the headers of a request without a body, signed as S3 asks (AWS Signature Version 4)."""
    now = datetime.now(UTC)
    moment, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    nothing = hashlib.sha256(b"").hexdigest()
    headers = {"host": host, "x-amz-content-sha256": nothing, "x-amz-date": moment}
    if access.token:
        headers["x-amz-security-token"] = access.token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    canonical = "\n".join((method, path, query, lines, names, nothing))
    scope = f"{day}/{access.region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{access.secret}".encode()
    for part in (day, access.region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}".encode(), hashlib.sha256).hexdigest()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={access.key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return headers


def _field(text: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]{{0,4096}})</{name}>", text)
    return html.unescape(found[1]) if found else ""


def _time(text: str) -> float:
    """Returns a time in seconds since the epoch; that of now for one that cannot be read, so that nothing looks old."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return datetime.now(UTC).timestamp()
