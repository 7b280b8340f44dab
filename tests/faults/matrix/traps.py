"""States of a hostile source: a careless unpickler runs their code or crashes.

The transport under test pickles them itself, so that everything else about them, checksums included, is right.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import shlex
from pathlib import Path
from typing import Any, Literal, TypeAlias

Trap: TypeAlias = Literal["system", "dotted", "pointer"]
"""``os.system`` by its own name; ``os.system`` through the attributes of a trusted module; a forged object pointer."""


def missing(trap: Trap) -> str:
    """Returns why this machine cannot set a trap; an empty string if it can."""
    return "numpy is not installed" if trap == "pointer" and importlib.util.find_spec("numpy") is None else ""


def set_trap(trap: Trap, marker: Path) -> Any:
    """Returns an object whose unpickling writes the file ``marker``, or crashes the process (``"pointer"``).

    The calling process must not do anything else afterwards: its ``os.system`` may be replaced.
    """
    command = f": > {shlex.quote(str(marker))}"
    if trap == "system":
        return _Calls(os.system, command)
    if trap == "dotted":
        _pickle_dotted_names()
        return _Calls(_renamed_system(), command)
    import numpy

    array = _Calls(numpy.ndarray, (1,), numpy.dtype("O"), b"\x41" * 8)
    return _Calls(list, array)  # list() dereferences the pointer


class _Calls:
    """Is pickled as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def _renamed_system() -> Any:
    """Returns a function that is pickled as ``torch.os.system`` of the trusted module ``torch.return_types``."""

    def system(command: str) -> int:
        raise AssertionError(f"{command!r} was to run elsewhere")

    system.__module__, system.__qualname__ = "torch.return_types", "torch.os.system"
    os.system = system  # type: ignore[assignment]  # a pickler checks that the name leads to the object
    return system


def _pickle_dotted_names() -> None:
    """Makes every pickler of this process use protocol 4: the older ones, torchft's too, have no dotted names."""

    class Pickler(pickle.Pickler):
        def __init__(self, file: Any, protocol: int | None = None, **more: Any) -> None:
            del protocol
            super().__init__(file, 4, **more)

    pickle.Pickler = Pickler  # type: ignore[misc, assignment]
