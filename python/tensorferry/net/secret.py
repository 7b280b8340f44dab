"""Reads the secret that the sources and receivers of one job share, from an argument or the environment."""

from __future__ import annotations

import os
from pathlib import Path

from .._native import Secret
from .._settings import SECRET, SECRET_FILE, setting
from ..errors import InvalidArgument


def shared_secret(secret: str | bytes | None) -> Secret | None:
    """Returns the secret from the argument or from the environment; ``None`` if neither has one.

    Args:
        secret: the secret itself; ``None`` takes ``TENSORFERRY_SECRET``, or the content of the file that
            ``TENSORFERRY_SECRET_FILE`` names, without a line end at its end

    Raises:
        InvalidArgument: the secret is neither text nor bytes or has fewer than 16 bytes, both variables are set, or the
            file cannot be read. An empty variable is an error, too: a lost secret must not disable authentication.
    """
    if secret is None:
        secret = _from_environment()
    if secret is None:
        return None
    # No message repeats the value: it might be the secret.
    if isinstance(secret, str):
        try:
            secret = secret.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(
                "secret has characters that UTF-8 cannot encode (lone surrogates): pass bytes"
            ) from None
    if not isinstance(secret, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"secret must be a string or bytes, not {type(secret).__name__}")
    return Secret(bytes(secret))


def _from_environment() -> bytes | None:
    """Returns the secret from ``TENSORFERRY_SECRET``, or from the file that ``TENSORFERRY_SECRET_FILE`` names."""
    value, path = setting(SECRET), setting(SECRET_FILE)
    if value is not None and path is not None:
        raise InvalidArgument(f"{SECRET} and {SECRET_FILE} are both set: set only one of them")
    if value is not None:
        return os.fsencode(value)
    if path is None:
        return None
    try:
        return secret_in(Path(path))
    except OSError as e:
        raise InvalidArgument(f"{SECRET_FILE} names a file that cannot be read: {e}") from e


def secret_in(path: Path) -> bytes:
    """Returns what the file at ``path`` holds, without a line end at its end.

    Raises:
        OSError: it cannot be read
    """
    return path.read_bytes().removesuffix(b"\n").removesuffix(b"\r")
