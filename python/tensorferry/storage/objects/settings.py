"""The settings of S3 in ``store_options``, and in the environment where the options have none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import InvalidArgument
from .url import without_secrets

#: The schemes of S3.
SCHEMES = frozenset({"s3", "s3a"})
#: The names of settings that have several, without ``aws_``: where the options have none of a setting's names, the
#: environment is asked for them in this order.
_NAMES = {
    "endpoint": ("endpoint_url_s3", "endpoint_url", "endpoint"),
    "region": ("region", "default_region"),
    "checksum": ("checksum_algorithm",),
    "unsigned_payload": ("unsigned_payload",),
}
#: What the library reads from the environment before any option, and takes as no option.
_ENDPOINT_OF_S3 = "AWS_ENDPOINT_URL_S3"
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


def for_s3(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of a store as the library is to get them: none stands behind another name in the environment.

    Raises:
        InvalidArgument: the endpoint is no URL, or the environment has one that the library takes before that of the
            options
    """
    found = dict(options)
    bare = {_bare(name): name for name in options}
    region = bare.get("default_region")
    if region is not None and "region" not in bare:
        found["region"] = found.pop(region)
    known = of_s3(options)
    if (endpoint := known.get("endpoint")) and not endpoint.startswith(("http://", "https://")):
        raise InvalidArgument(
            "the endpoint (in store_options, or AWS_ENDPOINT_URL) must be a URL such as https://host:9000, not "
            f"{without_secrets(endpoint)!r}"
        )
    given, first = known.get("endpoint"), os.environ.get(_ENDPOINT_OF_S3)
    if first and given != first:
        raise InvalidArgument(
            f"store_options has an endpoint, and the variable {_ENDPOINT_OF_S3} another one, which would be taken: "
            "remove the variable, or the option"
        )
    return found


def _bare(name: str) -> str:
    """Returns the name of a setting without the name of the store before it."""
    name = name.lower()
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
