"""The keyword arguments about serving that ``HTTPTransport`` and ``PeerWriter`` share."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, Unpack, cast

from .. import _settings, _validate
from ..errors import InvalidArgument
from .addresses import listening_addresses
from .certificates import Tls, encryption
from .secret import shared_secret

_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)
_MOST_PORT = (1 << 16) - 1


Function = TypeVar("Function", bound=Callable[..., Any])


class ServerArguments(TypedDict, total=False):
    """The keyword arguments of everything that serves; the docstring of ``HTTPTransport`` explains them.

    All may be left out, and are ``None`` then.
    """

    secret: str | bytes | None
    tls: Tls
    same_host: bool | None
    interface: str | None
    advertise: str | None
    max_bandwidth: int | None
    port: int | str | None
    metrics_port: int | str | None


class ServerOptions:
    """How a server is reached and what protects it, from :class:`ServerArguments`.

    Attributes:
        secret: the shared secret that clients must prove, held natively, where neither a ``repr`` nor a pickle nor a
            traceback shows it; ``None`` disables authentication
        tls: whether to encrypt
        certificate: the certificate that the server was given; ``None``: it makes one when it starts
        same_host: whether processes of this machine may use shared memory
        listening: the addresses to listen on; empty means all
        advertise: the name, address, interface or network to put into the metadata, or several with commas between
            them; ``None`` lets ``advertised_host`` choose
        max_bandwidth: bytes per second for all receivers together; ``None`` means no limit
        ports: the first and the last port to try; 0 means any
        metrics_ports: the same for the port on which counters alone are served; ``None``: there is no such port

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
        SystemRefused: the system does not list its interfaces
    """

    def __init__(self, **given: Unpack[ServerArguments]) -> None:
        """Checks the arguments, and reads the environment variables for those that are ``None``."""
        self.secret = shared_secret(given.get("secret"))
        self.tls, self.certificate = encryption(given.get("tls"))
        self.same_host = wants_same_host(given.get("same_host"))
        limit = given.get("max_bandwidth")
        self.max_bandwidth = None if limit is None else _validate.integer("max_bandwidth (bytes per second)", limit, 1)
        self.listening = listening_addresses(given.get("interface"))
        self.advertise = given.get("advertise")
        self.ports = port_range("port", given.get("port"), _settings.PORT) or (0, 0)
        self.metrics_ports = port_range("metrics_port", given.get("metrics_port"), _settings.METRICS_PORT)


def takes_server_arguments(function: Function) -> Function:
    """Decorates a function, such as an ``__init__``, with ``**server: Unpack[ServerArguments]``.

    It shows these one by one, and takes no others. So ``inspect.signature`` and ``help`` name them, and a misspelt one
    is refused as for any function.
    """
    declared = inspect.signature(function)
    kept = [one for one in declared.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind.__forward_arg__)
        for name, kind in ServerArguments.__annotations__.items()
    ]
    known = {one.name for one in (*kept, *added)}

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        for name in named:
            if name not in known:
                raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}")
        return function(*args, **named)

    checked.__signature__ = declared.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    return cast(Function, checked)


def port_range(name: str, given: int | str | None, variable: str) -> tuple[int, int] | None:
    """Returns the first and the last of the ports that a server may listen on; ``None`` if none is given.

    Args:
        name: the name of the argument, for messages
        given: a port, 0 for any, or a range like ``"29600-29699"``, both ends included; ``None`` takes the value of the
            environment variable
        variable: the name of that variable

    Raises:
        InvalidArgument: ``given`` is neither, or a range that ends before it begins
    """
    if given is None:
        name, given = variable, _settings.setting(variable) or None
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise InvalidArgument(
            f'{name} must be a port number or a range like "29600-29699", not {_validate.brief(given)}'
        )
    found = _PORTS.fullmatch(str(given))
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, _MOST_PORT + 1)
    # A range that begins with "any port" means nothing.
    if not first <= last <= _MOST_PORT or (first == 0 and last != 0):
        raise InvalidArgument(
            f'{name} must be a number from 1 to {_MOST_PORT}, 0 for any port, or a range like "29600-29699", not '
            f"{_validate.brief(given)}"
        )
    return first, last


def wants_same_host(asked: bool | None) -> bool:
    """Whether shared memory may replace the network.

    Args:
        asked: the user's choice; ``None`` reads ``TENSORFERRY_SAME_HOST`` (``0`` means no, ``1`` or
            unset means yes)

    Raises:
        InvalidArgument: ``asked`` is not a ``bool``, or the variable neither ``0`` nor ``1``
    """
    return _switch("same_host", asked, _settings.SAME_HOST, True)


def wants_relay(asked: bool | None) -> bool:
    """Whether a transport takes part where receivers send each other what they have.

    Args:
        asked: the user's choice; ``None`` reads ``TENSORFERRY_RELAY`` (``0`` means no, ``1`` or unset means yes)

    Raises:
        InvalidArgument: ``asked`` is not a ``bool``, or the variable neither ``0`` nor ``1``
    """
    return _switch("relay", asked, _settings.RELAY, True)


def _switch(name: str, asked: bool | None, variable: str, default: bool) -> bool:
    """Returns what the argument ``name`` says or, if it is ``None``, the variable or, without one, the default."""
    if asked is not None:
        return _validate.boolean(name, asked)
    value = _settings.setting(variable) or ""
    if value not in ("", "0", "1"):
        raise InvalidArgument(f"{variable} must be 0 or 1, not {_validate.brief(value)}")
    return value == "1" if value else default
