"""The settings of S3 in ``store_options``, and in the environment where the options have none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...errors import InvalidArgument
from .url import without_secrets

#: The schemes of S3.
SCHEMES = frozenset({"s3", "s3a"})
#: The names of settings that have several, without ``aws_``: where the options have none of a setting's names, the
#: environment is asked for them in this order.
_NAMES = {
    "endpoint": ("endpoint_url_s3", "endpoint_url", "endpoint"),
    "region": ("region", "default_region"),
    "token": ("session_token", "token"),
    "key": ("access_key_id",),
    "secret": ("secret_access_key",),
    "checksum": ("checksum_algorithm",),
    "unsigned_payload": ("unsigned_payload",),
}
#: How messages call settings that go into headers.
_SHOWN = {"region": "region", "token": "session token", "key": "access key id", "secret": "secret access key"}
#: What the library reads from the environment before any option, and takes as no option.
_ENDPOINT_OF_S3 = "AWS_ENDPOINT_URL_S3"
#: Options of the client of all stores, which belong into ``client_options``: as options of a store, the library takes
#: them for a mistake of its own, and ends with a message for its authors.
_OF_CLIENT = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "default_headers",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_max_frame_size",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
_PREFIXES = ("aws_", "azure_", "google_")


def of_s3(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings, as text, by the keys of ``_NAMES``; those that nothing is said of are missing.

    A switch is ``"True"`` or ``"False"`` where the options have it, and as it was written in the environment.

    Args:
        options: those of the store, by any of the library's names
    """
    given = {_bare(name): value for name, value in options.items() if isinstance(value, str | bool)}
    around = {_bare(name): value for name, value in os.environ.items() if name.startswith("AWS_")}
    found = {}
    for setting, names in _NAMES.items():
        said = [source[name] for source in (given, around) for name in names if source.get(name, "") != ""]
        if said:
            found[setting] = str(said[0])
    return found


def certificates() -> bytes | None:
    """Returns the content of the file that ``AWS_CA_BUNDLE`` names; ``None`` without one.

    Raises:
        InvalidArgument: it cannot be read
    """
    if not (path := os.environ.get("AWS_CA_BUNDLE")):
        return None
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise InvalidArgument(f"AWS_CA_BUNDLE={path}: it cannot be read: {e.strerror}") from e


def _check(known: Mapping[str, str]) -> None:
    """Refuses settings that no request can be made with, of which the library panics.

    Raises:
        InvalidArgument: the endpoint is no URL; or something is no line of plain text
    """
    for setting in ("region", "token", "key", "secret"):
        if not all(" " <= character <= "~" for character in known.get(setting, "")):
            raise InvalidArgument(
                f"the {_SHOWN[setting]} (in store_options, or {_variable(setting)}) has a line break, or another "
                "character that no request can have"
            )
    if endpoint := known.get("endpoint"):
        try:
            url = urlsplit(endpoint)
            is_url = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
        except ValueError:
            is_url = False
        if not is_url or not all("!" <= character <= "~" for character in endpoint):
            raise InvalidArgument(
                f"the endpoint (in store_options, or {_variable('endpoint')}) must be a URL such as https://host:9000, "
                f"not {without_secrets(endpoint)!r}"
            )


def _variable(setting: str) -> str:
    """Returns the variable of a setting that is set, or the first one that could be."""
    names = [f"AWS_{name.upper()}" for name in _NAMES[setting]]
    return next((name for name in names if os.environ.get(name)), names[0])


def for_s3(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of a store as the library is to get them: none stands behind another name in the environment.

    Raises:
        InvalidArgument: the environment has an endpoint that the library takes before that of the options; or a
            setting is none that a request can be made with
    """
    found = dict(options)
    bare = {_bare(name): name for name in options}
    region = bare.get("default_region")
    if region is not None and "region" not in bare:
        found["region"] = found.pop(region)
    known = of_s3(options)
    for name in _NAMES["endpoint"]:
        if options.get(bare.get(name, "")) == "":
            raise InvalidArgument(
                f"{bare[name]} in store_options is empty: remove it, or set it to the address of the store"
            )
        variable = f"AWS_{name.upper()}"
        if os.environ.get(variable) == "" and ("endpoint" not in known or variable == _ENDPOINT_OF_S3):
            raise InvalidArgument(f"{variable} is empty: remove it, or set it to the address of the store")
    _check(known)
    given, first = known.get("endpoint"), os.environ.get(_ENDPOINT_OF_S3)
    if first and given != first:
        raise InvalidArgument(
            f"store_options has an endpoint, and the variable {_ENDPOINT_OF_S3} another one, which would be taken: "
            "remove the variable, or the option"
        )
    return found


def refuse_client_options(options: Mapping[str, Any]) -> None:
    """Refuses options of the client among those of a store.

    Raises:
        InvalidArgument: there is one
    """
    for name in options:
        if _bare(name) in _OF_CLIENT:
            where = f"{{'client_options': {{{_bare(name)!r}: ...}}}}"
            raise InvalidArgument(f"store_options: {name} is none of a store: give it as store_options={where}")


def _bare(name: str) -> str:
    """Returns the name of a setting without the name of the store before it."""
    name = name.lower()
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
