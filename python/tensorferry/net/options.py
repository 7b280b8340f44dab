"""The keyword arguments about serving that ``HTTPTransport`` and ``PeerWriter`` share."""

from __future__ import annotations

import os

from .. import _validate
from ..errors import InvalidArgument
from .addresses import listening_address
from .secret import shared_secret


class ServerOptions:
    """How a server is reached and what protects it.

    The arguments are those of ``HTTPTransport`` that have the same names, and its docstring explains them.

    Attributes:
        secret: the shared secret that clients must prove, held natively, where neither a ``repr`` nor a pickle nor a
            traceback shows it; ``None`` disables authentication
        tls: whether to encrypt
        same_host: whether processes of this machine may use shared memory
        listening: the one address to listen on; ``None`` means all
        advertise: the name, address, interface or network to put into the metadata; ``None`` lets
            ``advertised_host`` choose
        max_bandwidth: bytes per second for all receivers together; ``None`` means no limit

    Raises:
        InvalidArgument: an argument cannot be used; it is named
    """

    def __init__(
        self,
        *,
        secret: str | bytes | None,
        tls: bool,
        same_host: bool | None,
        interface: str | None,
        advertise: str | None,
        max_bandwidth: int | None,
    ) -> None:
        """Checks the arguments, and reads the environment variables for those that are ``None``."""
        self.secret = shared_secret(secret)
        self.tls = _validate.boolean("tls", tls)
        self.same_host = wants_same_host(same_host)
        if max_bandwidth is not None:
            max_bandwidth = _validate.integer("max_bandwidth (bytes per second)", max_bandwidth, 1)
        self.max_bandwidth = max_bandwidth
        self.listening = listening_address(interface)
        self.advertise = advertise


def wants_same_host(asked: bool | None) -> bool:
    """Whether shared memory may replace the network.

    Args:
        asked: the user's choice; ``None`` reads ``TENSORFERRY_SAME_HOST`` (``0`` means no, ``1`` or
            unset means yes)

    Raises:
        InvalidArgument: ``asked`` is not a ``bool``, or the variable neither ``0`` nor ``1``
    """
    if asked is not None:
        return _validate.boolean("same_host", asked)
    value = os.environ.get("TENSORFERRY_SAME_HOST", "")
    if value not in ("", "0", "1"):
        raise InvalidArgument(f"TENSORFERRY_SAME_HOST must be 0 or 1, not {_validate.brief(value)}")
    return value != "0"
