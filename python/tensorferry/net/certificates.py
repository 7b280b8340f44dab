"""Whether to encrypt, and with which certificate: from an argument or the environment."""

from __future__ import annotations

import os
from pathlib import Path

from .. import _validate
from .._native import Certificate
from .._settings import TLS, TLS_CERTIFICATE, TLS_KEY, setting
from ..errors import InvalidArgument

#: The argument ``tls=`` of everything that serves: whether to encrypt, or the files of certificate and key.
Tls = bool | tuple[str | os.PathLike[str], str | os.PathLike[str]] | None


def encryption(tls: Tls) -> bool | tuple[str, str]:
    """Returns whether servers encrypt, or the paths of the certificate and of its key with which they do.

    Args:
        tls: whether to encrypt, or the paths, both of files in PEM form; ``None`` takes ``TENSORFERRY_TLS`` (``0`` or
            ``1``), and yes where the environment names files. Wherever ``tls`` names none, the files are those of
            ``TENSORFERRY_TLS_CERTIFICATE`` and ``TENSORFERRY_TLS_KEY``

    Raises:
        InvalidArgument: ``tls`` is none of these, a variable has another value, or only one of the files is named
    """
    if isinstance(tls, tuple):
        if len(tls) != 2 or not all(isinstance(path, (str, os.PathLike)) for path in tls):
            raise InvalidArgument("tls must be a bool, or the paths of a certificate and of its key, in this order")
        return os.fspath(tls[0]), os.fspath(tls[1])
    if tls is None:
        value = setting(TLS) or ""
        if value not in ("", "0", "1"):
            raise InvalidArgument(f"{TLS} must be 0 or 1, not {_validate.brief(value)}")
        # Half of an identity is an error whether or not it would be used: the user has meant to encrypt.
        named = _files_from_environment() is not None
        tls = value == "1" if value else named
    return _validate.boolean("tls", tls) and (_files_from_environment() or True)


def certificate_of(tls: bool | tuple[str, str]) -> Certificate | None:
    """Returns the certificate of a server; ``None``: it makes one when it starts, if it encrypts at all.

    Raises:
        InvalidArgument: a file cannot be read or has no such content, or the key is not that of the certificate
    """
    if isinstance(tls, bool):
        return None
    try:
        return Certificate(_read_file("certificate", tls[0]), _read_file("key", tls[1]))
    except InvalidArgument as e:
        raise InvalidArgument(f"TLS with {tls[0]!r} and {tls[1]!r}: {e}") from None


def _files_from_environment() -> tuple[str, str] | None:
    certificate, key = setting(TLS_CERTIFICATE), setting(TLS_KEY)
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        there, missing = (TLS_KEY, TLS_CERTIFICATE) if certificate is None else (TLS_CERTIFICATE, TLS_KEY)
        raise InvalidArgument(
            f"{there} is set, and {missing} is not: set both, or neither and {TLS}=1 for a certificate that is made "
            "at each start"
        )
    return certificate, key


def _read_file(what: str, path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as e:
        raise InvalidArgument(f"the {what} names a file that cannot be read: {e}") from e
