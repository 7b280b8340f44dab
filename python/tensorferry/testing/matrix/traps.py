"""States of a hostile source: who unpickles them without care runs code, or dies.

The transport under test pickles them itself, so that everything else about them, checksums included, is right.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import shlex
from pathlib import Path
from typing import Any, Literal, TypeAlias

__all__ = ["Trap", "missing", "set_trap"]

Trap: TypeAlias = Literal["system", "dotted", "pointer"]
"""``os.system`` by its own name; the same by way of an innocent module's attributes; a forged pointer to an object."""


def missing(trap: Trap) -> str:
    """What is not here and the trap needs; nothing if it can be set."""
    return "numpy is not installed" if trap == "pointer" and importlib.util.find_spec("numpy") is None else ""


def set_trap(trap: Trap, marker: Path) -> Any:
    """An object for a state. Who falls into it writes the file ``marker``, or dies of ``"pointer"``.

    This process can be used for nothing else afterwards: its ``os.system`` may be gone.
    """
    command = f": > {shlex.quote(str(marker))}"
    if trap == "system":
        return _Calls(os.system, command)
    if trap == "dotted":
        _pickle_dotted_names()
        return _Calls(_renamed_system(), command)
    import numpy

    array = _Calls(numpy.ndarray, (1,), numpy.dtype("O"), b"\x41" * 8)
    return _Calls(list, array)  # which has to look at the object


class _Calls:
    """What unpickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def _renamed_system() -> Any:
    """A function that is pickled as ``torch.os.system`` of a module that everybody trusts."""

    def system(command: str) -> int:
        raise AssertionError(f"{command!r} was to run elsewhere")

    system.__module__, system.__qualname__ = "torch.return_types", "torch.os.system"
    os.system = system  # type: ignore[assignment]  # a pickler wants to find what it names
    return system


def _pickle_dotted_names() -> None:
    """Older protocols, torchft's among them, have no names with dots; who reads them reads this one as well."""

    class Pickler(pickle.Pickler):
        def __init__(self, file: Any, protocol: int | None = None, **more: Any) -> None:
            del protocol
            super().__init__(file, 4, **more)

    pickle.Pickler = Pickler  # type: ignore[misc, assignment]
