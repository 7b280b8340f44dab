"""The place that a path or a URL names, which users give as text: the same one for writers and readers.

What can be done in object stores takes :func:`any_place`; everything else takes :func:`place_of`, which refuses URLs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

from .. import _validate
from ..errors import InvalidArgument, SystemRefused
from .objects.place import ObjectPlace
from .objects.url import is_store, without_secrets

#: The place of a checkpoint: a folder or a file, or a place in an object store.
AnyPlace: TypeAlias = Path | ObjectPlace


def place_of(path: Any, name: str = "path") -> Path:
    """Returns the absolute path of the file or folder that ``path`` names now, as the system would find it.

    A relative path is one in the current folder, and links on the way are followed before a ``..`` behind them leads up
    again. The result has neither, so that it names the same place in another process, after ``chdir``, and when a link
    on the way leads elsewhere. If the last name in ``path`` is a link, it stays; ``~`` is a name like any other.

    Args:
        path: a string or a path object
        name: the name of the argument, for messages

    Raises:
        InvalidArgument: it does not name a file or folder of this machine
        SystemRefused: it is relative, and the current folder is gone
    """
    text = _checked(path, name)
    above, last = os.path.split(text.rstrip("/") or "/")
    try:
        if last in ("", ".", ".."):
            return Path(os.path.realpath(text))
        return Path(os.path.realpath(above), last)
    except OSError as e:
        raise SystemRefused(e.errno, f"{text} cannot be found from the current folder: {e.strerror}") from e


def local_path(path: Any, name: str = "path") -> Path:
    """Returns ``path`` as a path, as it is: relative or not.

    Raises:
        InvalidArgument: it does not name a file or folder of this machine
    """
    return Path(_checked(path, name))


def _checked(path: Any, name: str) -> str:
    """Returns the text of a path.

    Raises:
        InvalidArgument: it does not name a file or folder of this machine
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or not _is_file_name(text):
        raise InvalidArgument(f"{name} must be the path of a file or folder, not {_validate.brief(path)}")
    refuse_url(text, name)
    if "://" in text:
        shown = without_secrets(text)
        raise InvalidArgument(
            f"{_validate.brief(shown)} is not a path of this machine: checkpoints lie in file systems and object "
            "stores (s3://, gs://, az://)"
        )
    return text


def refuse_url(path: Any, name: str = "path") -> None:
    """Refuses the URL of a place in an object store, also after a path object has taken one of its slashes.

    Raises:
        InvalidArgument: ``path`` is one
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        return
    if is_store(text):
        raise InvalidArgument(
            f"{name} {_validate.brief(without_secrets(text))} is in an object store, which this does not take: give "
            "the path of a folder of this machine"
        )
    if is_store(text.replace(":/", "://", 1)):
        raise InvalidArgument(
            f"{name} {_validate.brief(text)} was a URL before it became a path object: give it as text, where URLs are "
            "taken"
        )


def any_place(
    path: Any,
    name: str = "path",
    *,
    store_options: Mapping[str, Any] | None = None,
    timeout: timedelta | None = None,
) -> AnyPlace:
    """Returns the folder or file that a path names, or the place in an object store that a URL names.

    Args:
        path: a string or a path object; only a string can be a URL. A place stays what it is
        name: the name of the argument, for messages
        store_options: options of obstore for the store; nothing looks at them otherwise
        timeout: how long all requests of a save or load may take together, likewise; ``None`` chooses

    Raises:
        InvalidArgument: it names neither; or, of a store, obstore is not installed, or an option or ``timeout`` cannot
            be used
        SystemRefused: it is relative, and the current folder is gone; or obstore cannot be loaded
    """
    if isinstance(path, ObjectPlace):
        return path
    if isinstance(path, str) and is_store(path):
        return ObjectPlace.of(path, name, store_options, timeout)
    return place_of(path, name)


def place_as_given(
    path: Any,
    name: str = "path",
    *,
    store_options: Mapping[str, Any] | None = None,
    timeout: timedelta | None = None,
) -> AnyPlace:
    """As :func:`any_place`, but a path stays as it is, relative or not, and a place is refused; raises as it."""
    if is_store_url(path):
        return any_place(path, name, store_options=store_options, timeout=timeout)
    return local_path(path, name)


def is_store_url(path: Any) -> bool:
    """Whether a user's argument is the URL of a place in an object store."""
    return isinstance(path, str) and is_store(path)


def begun(place: AnyPlace) -> AnyPlace:
    """Returns the same place in an operation that begins now: in a store, all its requests have one deadline."""
    return place.begun() if isinstance(place, ObjectPlace) else place


def _is_file_name(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
