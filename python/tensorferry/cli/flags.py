"""The options that verbs share, as dataclasses that a verb takes as one keyword argument each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from .._native import Secret
from ..checkpointing.keeper.limits import amount
from ..errors import InvalidArgument
from ..net.certificates import wants_tls
from ..net.options import ServerOptions, wants_same_host
from ..net.secret import secret_in, shared_secret

#: ``--json``, of every verb that prints a result.
Json = Annotated[bool, Parameter(name="--json", negative=())]
#: An option that is either given or not.
Switch = Annotated[bool, Parameter(negative=())]
#: ``--relay`` and ``--no-relay``.
Relay = Annotated[bool | None, Parameter(name="--relay", negative="--no-relay")]


@Parameter(name="*")
@dataclass(frozen=True)
class Trust:
    """What peers have to prove, and what they are given.

    Attributes:
        secret_file: a file with the secret that sources and receivers share; by default TENSORFERRY_SECRET_FILE, or the
            secret in TENSORFERRY_SECRET
        tls: encrypt, and fetch only from sources that do (default: what TENSORFERRY_TLS says)
        same_host: use shared memory between processes of one machine
    """

    secret_file: Path | None = None
    tls: Switch = False
    same_host: Annotated[bool | None, Parameter(negative="--no-same-host")] = None

    def secret(self) -> Secret | None:
        """Returns the shared secret; ``None`` if neither the file nor the environment has one.

        Raises:
            InvalidArgument: the file, or that of the environment, cannot be read, or what it holds is no secret
        """
        return shared_secret(self.given_secret())

    def given_secret(self) -> bytes | None:
        """Returns what the file holds, if one was named.

        Raises:
            InvalidArgument: the file cannot be read
        """
        return None if self.secret_file is None else self._read_secret_file(self.secret_file)

    @staticmethod
    def _read_secret_file(path: Path) -> bytes:
        """Returns what the file at ``path`` holds, without the end of its last line.

        Raises:
            InvalidArgument: it cannot be read
        """
        try:
            return secret_in(path)
        except OSError as e:
            raise InvalidArgument(f"--secret-file cannot be read: {e}") from e

    def insists_on_tls(self) -> bool:
        """Whether sources that do not encrypt are refused.

        Raises:
            InvalidArgument: a variable that says so has a wrong value
        """
        return wants_tls(True if self.tls else None)

    def uses_same_host(self) -> bool:
        """Whether shared memory may replace the network.

        Raises:
            InvalidArgument: the variable that says so has a wrong value
        """
        return wants_same_host(self.same_host)


@Parameter(name="*")
@dataclass(frozen=True)
class Serving:
    """How a server is reached.

    Attributes:
        interface: listen only on this interface, address or network, or on several with commas (default: all)
        port: listen on this port, or on the first free one of a range like 29600-29699 (default: any)
        metrics_port: serve /metrics and a status page, and nothing else, on this port too, to everybody
        advertise: the name or address by which peers reach this host
        max_bandwidth: bytes per second for all receivers together, such as 500M (K, M and G are powers of 1024)
        relay: hosts whose pulls take long send each other what they have received (default: TENSORFERRY_RELAY, or yes)
    """

    interface: str | None = None
    port: str | None = None
    metrics_port: str | None = None
    advertise: str | None = None
    max_bandwidth: str | None = None
    relay: Relay = None

    def options(self, trust: Trust) -> ServerOptions:
        """Returns these options but for ``relay``, and those of ``trust``, as a server takes them.

        Raises:
            InvalidArgument: one of them, or a variable that stands in for one, cannot be used
        """
        return ServerOptions(
            secret=trust.given_secret(),
            tls=True if trust.tls else None,
            same_host=trust.same_host,
            interface=self.interface,
            advertise=self.advertise,
            max_bandwidth=None if self.max_bandwidth is None else amount("--max-bandwidth", self.max_bandwidth),
            port=self.port,
            metrics_port=self.metrics_port,
        )


@Parameter(name="*")
@dataclass(frozen=True)
class Receiving:
    """How long a receive may take, and over how many connections.

    Attributes:
        timeout: seconds after which it fails
        lanes: connections (default: by the number of cores)
    """

    timeout: float = 600.0
    lanes: int | None = None

    def checked_lanes(self) -> int | None:
        """Returns ``lanes``.

        Raises:
            InvalidArgument: there are none
        """
        if self.lanes is not None and self.lanes < 1:
            raise InvalidArgument(f"--lanes must be 1 or more, not {self.lanes}")
        return self.lanes
