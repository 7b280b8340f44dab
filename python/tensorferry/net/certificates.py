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


def encryption(tls: Tls) -> tuple[bool, Certificate | None]:
    """Returns whether a server encrypts, and the certificate that it was given; ``None``: it makes one when it starts.

    Args:
        tls: whether to encrypt, or the paths of a certificate and of its key, both in PEM form; ``None`` takes
            ``TENSORFERRY_TLS`` (``0`` or ``1``), and yes where the environment names files. Wherever ``tls`` names
            none, the files are those of ``TENSORFERRY_TLS_CERTIFICATE`` and ``TENSORFERRY_TLS_KEY``

    Raises:
        InvalidArgument: ``tls`` is none of these, a variable has another value, only one of the files is named, one of
            them cannot be read or has no such content, or the key is not that of the certificate
    """
    if isinstance(tls, tuple):
        if len(tls) != 2 or not all(isinstance(path, (str, os.PathLike)) for path in tls):
            raise InvalidArgument("tls must be a bool, or the paths of a certificate and of its key, in this order")
        return True, _load(("the certificate of tls=", tls[0]), ("the key of tls=", tls[1]))
    if not wants_tls(tls):
        return False, None
    files = _files_from_environment()
    return True, None if files is None else _load((TLS_CERTIFICATE, files[0]), (TLS_KEY, files[1]))


def wants_tls(tls: bool | None) -> bool:
    """Whether a server encrypts, and a receiver refuses sources that do not; no file is read for that.

    Args:
        tls: the user's choice; ``None`` takes it from the environment, as for :func:`encryption`

    Raises:
        InvalidArgument: it is no ``bool``, a variable has another value, or only one of the files is named
    """
    if tls is not None:
        return _validate.boolean("tls", tls)
    value = setting(TLS) or ""
    if value not in ("", "0", "1"):
        raise InvalidArgument(f"{TLS} must be 0 or 1, not {_validate.brief(value)}")
    # Half of an identity is an error whether or not it would be used: the user has meant to encrypt.
    named = _files_from_environment() is not None
    return value == "1" if value else named


def fingerprint_of(path: str | os.PathLike[str]) -> str:
    """Returns the fingerprint that URLs of a server with this certificate have: ``sha256-`` and 64 digits.

    Raises:
        InvalidArgument: the file cannot be read, or has no certificate in PEM form
    """
    try:
        return Certificate.fingerprint_of(_read_file("the certificate", path))
    except InvalidArgument as e:
        raise InvalidArgument(f"{os.fspath(path)}: {e}") from None


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


def _load(certificate: tuple[str, str | os.PathLike[str]], key: tuple[str, str | os.PathLike[str]]) -> Certificate:
    found = _read_file(*certificate), _read_file(*key)
    try:
        return Certificate(*found)
    except InvalidArgument as e:
        raise InvalidArgument(f"{os.fspath(certificate[1])} and {os.fspath(key[1])}: {e}") from None


def _read_file(name: str, path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as e:
        raise InvalidArgument(f"{name} names a file that cannot be read: {e}") from e
