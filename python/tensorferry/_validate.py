"""What callers give, looked at before it is used: an error that names the argument instead of one from deep inside."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from .errors import InvalidArgument

T = TypeVar("T")

#: The largest 64-bit number with a sign.
_MOST = (1 << 63) - 1
#: How much of a wrong string a message repeats.
_SHOWN = 120


def seconds(name: str, value: timedelta) -> float:
    """The length of ``value`` in seconds.

    Raises:
        InvalidArgument: it is no ``timedelta``
    """
    return _one(name, value, timedelta, "a datetime.timedelta, such as timedelta(seconds=60)").total_seconds()


def patience(name: str, value: timedelta) -> float:
    """The length of ``value`` in seconds, for as long as something may be waited for.

    Raises:
        InvalidArgument: it is no ``timedelta``, or a negative one
    """
    if (number := seconds(name, value)) < 0:
        raise InvalidArgument(f"{name} is no time before now: {value}")
    return number


def integer(name: str, value: Any, least: int, most: int = _MOST) -> int:
    """``value`` as an integer from ``least`` to ``most``.

    Raises:
        InvalidArgument: it is none
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} is a whole number, not {brief(value)}") from None
    if not least <= number <= most:
        limits = f"{least} or more" if number < least else f"at most {most}"
        raise InvalidArgument(f"{name} is {limits}, not {brief(number)}")
    return number


def step_number(value: Any) -> int:
    """``value`` as the number of a step.

    Raises:
        InvalidArgument: it is no whole number of 64 bits
    """
    return integer("step", value, -_MOST - 1)


def boolean(name: str, value: Any) -> bool:
    """``value``, which is ``True`` or ``False``.

    Raises:
        InvalidArgument: it is neither
    """
    return _one(name, value, bool, "True or False")


def string(name: str, value: Any) -> str:
    """``value``, which is a string.

    Raises:
        InvalidArgument: it is none
    """
    return _one(name, value, str, "a string")


def function(name: str, value: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """``value``, which can be called, or is ``None``.

    Raises:
        InvalidArgument: it cannot be called
    """
    if value is not None and not callable(value):
        raise InvalidArgument(f"{name} is a function, or None, not {brief(value)}")
    return value


def items(name: str, value: Iterable[Any]) -> list[Any]:
    """The members of ``value``, which is no string.

    Raises:
        InvalidArgument: it cannot be iterated over, or is a string
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable) or isinstance(value, type):
        raise InvalidArgument(f"{name} is a list or another iterable, not {brief(value)}")
    return list(value)


def _one(name: str, value: Any, kind: type[T], what: str) -> T:
    """``value``, which is of this kind; a message calls it ``what``."""
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} is {what}, not {brief(value)}")
    return value


def brief(value: Any) -> str:
    """``value`` as a message repeats it: not all of something long."""
    said = repr(value)
    return said if len(said) <= _SHOWN else f"{said[:_SHOWN]}... ({type(value).__name__})"
