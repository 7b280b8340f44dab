"""``tensorferry doctor``: looks at this host as a transport would use it, and says what is wrong and what to do."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from importlib import metadata as packages
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from packaging.requirements import Requirement

from ..._settings import ADVERTISE, INTERFACE, METRICS_PORT, PORT, setting
from ..._validate import readable
from ...errors import ConnectError, FetchTimeout, InvalidArgument, TensorferryError, message_of
from ...net import addresses
from ...net.network import items, port_range
from .. import console, exits
from ..peers import Peers, ask, open_source, peers_of

if TYPE_CHECKING:
    from ..._native import Remote

#: A name lookup that takes longer than this delays every start.
_SLOW_LOOKUP_S = 0.2
#: A rate below these shares of the interface's speed is bad, or worth a warning.
_BAD_SHARE, _LOW_SHARE = 0.1, 0.5
#: What is said of a source that runs and has published nothing, or has withdrawn it.
_NOTHING_NOW = re.compile("has withdrawn what it published|has never published anything|for a checkpoint to be allowed")
_DOCS = "https://github.com/tensorferry/tensorferry/blob/main/docs"
_GOOD, _WARN, _BAD = "ok", "warn", "bad"


class Finding(NamedTuple):
    """What a check has found.

    Attributes:
        about: what was looked at
        verdict: ``"ok"``, ``"warn"`` if it may matter, ``"bad"`` if it will
        text: what was found
        remedy: what to do about it
    """

    about: str
    verdict: str
    text: str
    remedy: str = ""


def doctor(*metadata: str, seconds: float = 1.0, timeout: float = 60.0, json: bool = False) -> int:
    """Says which address a transport here would use and why, whether versions and ports fit, and how fast a peer sends.

    With METADATA of a running transport, each address of the peer sends for a moment, by itself, and the rate is
    compared with the speed of the interface. Ends with status 1 if something is bad.

    Args:
        metadata: of the peers to measure the way to
        seconds: how long each address sends; what comes is dropped, and slows a heal that runs
        timeout: seconds in which a peer must answer
        json: print the findings as one JSON document
    """
    if not 0.1 <= seconds <= 3600:
        raise InvalidArgument(f"--seconds must be between 0.1 and 3600, not {seconds}")
    findings: list[Any] = []
    for check in (_versions, _address, _ports):
        try:
            findings += check()
        except Exception as e:  # A check that cannot look must not keep the others from it.
            findings.append(Finding(check.__name__.strip("_"), _WARN, f"cannot be checked: {type(e).__name__}: {e}"))
    if metadata:
        findings += _check_peer(metadata, timeout, seconds)
    if json:
        console.out_json([finding._asdict() for finding in findings])
    else:
        width = max(len(finding.about) for finding in findings)
        for about, verdict, text, remedy in findings:
            console.out(f"{verdict:<5} {about:<{width}}  {text}")
            if remedy:
                console.out(f"{'':<5} {'':<{width}}  -> {remedy}")
    return exits.NO if any(finding.verdict == _BAD for finding in findings) else exits.OK


def _versions() -> Iterator[Finding]:

    # Those of extras count where the package is there.
    for one in map(Requirement, packages.requires("tensorferry") or []):
        if one.name not in ("torch", "torchft", "megatron-core"):
            continue
        try:
            version = packages.version(one.name)
        except packages.PackageNotFoundError:
            continue
        fits = one.specifier.contains(version, prereleases=True)
        text = f"{version}, of {one.specifier}" if fits else f"{version} was not tested: {one.specifier} is"
        yield Finding(
            one.name, _GOOD if fits else _BAD, text, "" if fits else f"pip install '{one.name}{one.specifier}'"
        )


def _address() -> Iterator[Finding]:
    own = addresses.listening_addresses(items("interface", setting(INTERFACE)))
    listening = next(iter(own), None)
    where = f"only on {', '.join(own)}, as TENSORFERRY_INTERFACE asks" if own else "on all addresses"
    yield Finding("listens", _GOOD, where)
    name, started = socket.gethostname(), time.perf_counter()
    remedy = "repair the name server, set TENSORFERRY_ADVERTISE, or add the name to /etc/hosts"
    try:
        found = addresses.resolved(name)
        took = time.perf_counter() - started
        text = f"{name} is {', '.join(found)}, found in {took:.3f} s"
        slow = took > _SLOW_LOOKUP_S
        yield Finding("name lookup", _WARN if slow else _GOOD, text, remedy if slow else "")
    except FetchTimeout as e:
        yield Finding("name lookup", _BAD, f"no name server has answered: {message_of(e)}", remedy)
    except ConnectError:
        yield Finding("name lookup", _GOOD, f"{name} is not known to the name server")
    try:
        host = addresses.advertised_host(items("advertise", setting(ADVERTISE)), listening)
    except InvalidArgument as e:
        yield Finding("advertises", _BAD, str(e), "correct TENSORFERRY_ADVERTISE")
        return
    ways = {"TENSORFERRY_ADVERTISE": setting(ADVERTISE), "TENSORFERRY_INTERFACE": listening, "its name": host == name}
    why = next((way for way, is_given in ways.items() if is_given), "the default route, since its name leads elsewhere")
    is_local = host.startswith("127.") or host in ("::1", "localhost")
    remedy = "set TENSORFERRY_ADVERTISE or TENSORFERRY_INTERFACE to what peers can reach" if is_local else ""
    yield Finding("advertises", _WARN if is_local else _GOOD, f"{host}, by {why}", remedy)


def _ports() -> Iterator[Finding]:
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        low, high = 1, 0
    for variable in (PORT, METRICS_PORT):
        try:
            ports = port_range("port", None, variable)
        except InvalidArgument as e:
            yield Finding("ports", _BAD, str(e), f"correct {variable}")
            continue
        if ports is None or ports == (0, 0):
            continue
        taken = ports[0] <= high and ports[1] >= low
        remedy = f"choose ports outside of {low}-{high}, from which the system takes those of outgoing connections"
        text = f"{variable} is {ports[0]}-{ports[1]}"
        yield Finding("ports", _WARN if taken else _GOOD, text, remedy if taken else "")


def _check_peer(metadata: tuple[str, ...], timeout: float, seconds: float) -> Iterator[Finding]:
    """Opens what a peer serves, and receives from each of its addresses for ``seconds``."""
    started = time.perf_counter()
    try:
        found = Peers.of(metadata)
        remote, step = open_source(found.urls[:1], found.step, timeout)
        try:
            yield Finding("peer", _GOOD, f"step {step}, opened in {time.perf_counter() - started:.3f} s")
            # Of several addresses that of the host may be one where nobody answers.
            rails = remote.rails or [
                (remote.address or addresses.resolved(urlsplit(found.urls[0]).hostname or "")[0], 0)
            ]
            limit = _max_bandwidth(found.urls[0])
            for there, mbit in rails:
                yield _measure(remote, there, mbit * 125_000.0, limit, seconds)
        finally:
            remote.close()
    except TensorferryError as e:
        yield _failed(e)


def _failed(error: TensorferryError) -> Finding:
    """Returns the finding for a peer that cannot be opened."""
    text = message_of(error)
    if _NOTHING_NOW.search(text):
        remedy = "it is reached; a torchft job publishes its state only while a replica heals, so this is normal there"
        return Finding("peer", _WARN, f"publishes nothing now: {text}", remedy)
    return Finding("peer", _BAD, f"{type(error).__name__}: {text}", f"see {_DOCS}/reference/errors.md")


def _measure(remote: Remote, there: str, speed: float, limit: float, seconds: float) -> Finding:
    """Receives from one address, and holds the rate against the slowest of the links and the source's limit."""
    try:
        nbytes, took, here = remote.measure(there, seconds)
    except TensorferryError as e:
        remedy = "repair the network to it, or leave it out with advertise= at the source: receivers try it each time"
        return Finding("address", _BAD, f"nothing arrives from {there}: {message_of(e)}", remedy)
    rate = nbytes / max(took, 1e-9)
    speeds = [(speed, "its link there")] if speed else []
    if (own := addresses.interface_speed(here)) is not None:
        speeds.append((own[1], f"{own[0]} here"))
    if limit:
        speeds.append((limit, "the source's max_bandwidth"))
    text = f"{there} to {here} at {readable(rate)}/s"
    if not speeds:
        return Finding("address", _GOOD, f"{text}; the speeds of its links are not known")
    expected, what = min(speeds)
    share = rate / expected
    # Below its own limit, a source may be sending to others.
    bad = _BAD if expected != limit else _WARN
    verdict = bad if share < _BAD_SHARE else _WARN if share < _LOW_SHARE else _GOOD
    remedy = (
        "" if verdict == _GOOD else "see whom else it sends to (tensorferry top), and check cable, port and settings"
    )
    return Finding("address", verdict, f"{text}, {share:.0%} of {what}: {readable(expected)}/s", remedy)


def _max_bandwidth(url: str) -> float:
    """Returns the limit of a source in bytes per second; 0 if it has none, or does not say."""
    (peer,) = peers_of(url)
    ask(peer)
    return peer.value("max_bandwidth_bytes_per_second")
