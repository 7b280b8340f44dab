"""Validates public arguments before they are used, so that the error names the argument.

Every function takes the argument's name, for the message, and its value; it returns the checked value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from .errors import InvalidArgument

T = TypeVar("T")

#: The largest signed 64-bit integer.
_MOST = (1 << 63) - 1
#: How many characters of a wrong value a message repeats.
_SHOWN = 120
_AMOUNT = re.compile(r"(?P<number>\d{1,30}(\.\d{1,30})?)\s*(?P<unit>%|[KMGT]?(i?B)?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def seconds(name: str, value: timedelta) -> float:
    """Returns the length of ``value`` in seconds.

    Raises:
        InvalidArgument: ``value`` is not a ``timedelta``
    """
    return instance(name, value, timedelta, "a datetime.timedelta, such as timedelta(seconds=60)").total_seconds()


def patience(name: str, value: timedelta) -> float:
    """Returns the length of ``value``, a time to wait, in seconds.

    Raises:
        InvalidArgument: ``value`` is not a ``timedelta``, or is negative
    """
    if (number := seconds(name, value)) < 0:
        raise InvalidArgument(f"{name} must not be negative, but is {value}")
    return number


def integer(name: str, value: Any, least: int, most: int = _MOST) -> int:
    """Returns ``value`` as an integer from ``least`` to ``most``, both inclusive.

    ``1e9`` is one; ``0.5`` is not, and neither is ``True``.

    Raises:
        InvalidArgument: ``value`` is not a whole number, or out of range
    """
    try:
        if isinstance(value, bool):
            raise TypeError("a truth value")
        number = operator.index(int(value) if isinstance(value, float) and value.is_integer() else value)
    except TypeError:
        raise InvalidArgument(f"{name} must be a whole number, not {brief(value)}") from None
    if not least <= number <= most:
        limits = f"{least} or more" if number < least else f"at most {most}"
        raise InvalidArgument(f"{name} must be {limits}, not {brief(number)}")
    return number


def step_number(value: Any) -> int:
    """Returns ``value`` as a step number.

    Raises:
        InvalidArgument: ``value`` is not a signed 64-bit integer
    """
    return integer("step", value, -_MOST - 1)


def boolean(name: str, value: Any) -> bool:
    """Returns ``value``, which must be ``True`` or ``False``.

    Raises:
        InvalidArgument: it is neither
    """
    return instance(name, value, bool, "True or False")


def string(name: str, value: Any) -> str:
    """Returns ``value``, which must be a string.

    Raises:
        InvalidArgument: it is not
    """
    return instance(name, value, str, "a string")


def function(name: str, value: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Returns ``value``, which must be callable or ``None``.

    Raises:
        InvalidArgument: it is neither
    """
    if value is not None and not callable(value):
        raise InvalidArgument(f"{name} must be a function or None, not {brief(value)}")
    return value


def items(name: str, value: Iterable[Any]) -> list[Any]:
    """Returns the items of the iterable ``value`` as a list.

    Raises:
        InvalidArgument: ``value`` is not iterable, or is a string, ``bytes`` or a class
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable) or isinstance(value, type):
        raise InvalidArgument(f"{name} must be a list or another iterable, not {brief(value)}")
    return list(value)


def instance(name: str, value: Any, kind: type[T], what: str) -> T:
    """Returns ``value``, which must be an instance of ``kind``; ``what`` names that in the message, such as "a dict".

    Raises:
        InvalidArgument: it is not
    """
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} must be {what}, not {brief(value)}")
    return value


def brief(value: Any) -> str:
    """Returns the ``repr`` of ``value`` for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({type(value).__name__})"


def amount(name: str, text: str, whole: int | None = None) -> int:
    """Returns the bytes that ``text`` stands for, and a share of ``whole``: ``"20G"`` is 20 * 2**30.

    Raises:
        InvalidArgument: it is no amount; ``name`` is what the message calls it
    """
    found = _AMOUNT.fullmatch(text.strip())
    if not found or (found["unit"] == "%" and whole is None):
        share = ", or a share such as 40%" if whole is not None else ""
        raise InvalidArgument(
            f"{name} must be a number of bytes, with K, M, G or T if you like{share}, not {brief(text)}"
        )
    number, unit = float(found["number"]), found["unit"].upper()
    if unit == "%":
        return int(number / 100 * (whole or 0))
    return int(number * 1024 ** _POWERS[unit.rstrip("B").rstrip("I")])


def readable(nbytes: float) -> str:
    """Returns ``nbytes`` for people: ``"1.5 GiB"``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} bytes"
