"""Docstrings as help: each paragraph on one line, so that it fills whatever width a terminal has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .. import flags

_SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:")


def reflowed(text: str) -> str:
    """Returns a docstring with each paragraph, and each argument of a section, on one line."""
    lines: list[str] = []
    for line in inspect.cleandoc(text).splitlines():
        last = lines[-1] if lines else ""
        begins = not line or not last or last in _SECTIONS or line in _SECTIONS
        # In a section, what continues an argument is indented further than the argument.
        if begins or (_indent(last) and _indent(line) <= _indent(last)):
            lines.append(line)
        else:
            lines[-1] = f"{last} {line.lstrip()}"
    return "\n".join(lines)


def documented(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Reflows the docstrings of a verb and of the options that verbs share, in place; returns the verb."""
    for one in (verb, flags.Receiving, flags.Serving, flags.Trust):
        one.__doc__ = reflowed(one.__doc__ or "")
    return verb


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
