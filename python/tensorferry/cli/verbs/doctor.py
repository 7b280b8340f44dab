"""``tensorferry doctor``: looks at this host as a transport would use it, and says what is wrong and what to do."""

from __future__ import annotations

import os
import re
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..._native import _available_memory, _memory_limit
from ..._settings import ADVERTISE, METRICS_PORT, PORT, setting
from ...errors import ConnectError, FetchTimeout, InvalidArgument, TensorferryError, UnprovenSource, message_of
from ...net import addresses
from ...net.options import port_range
from ...net.report import counted
from .. import exits
from ..flags import Json, Receiving, Switch, Trust
from ..output import console
from ..rail_rates import RailRate, rail_rates

#: A name lookup that takes longer than this delays every start.
_SLOW_LOOKUP_S = 0.2
#: A rate below these shares of the interface's speed is bad, or worth a warning.
_BAD_SHARE, _LOW_SHARE = 0.1, 0.5
#: A source that takes longer than this to open is waited for.
_SLOW_OPENING_S = 1.0
_LATE = (
    "a heal that runs took the source's bandwidth or cores, it had not published yet, or its name took long to "
    "resolve: tensorferry top METADATA shows whom it sends to"
)
_SHARED = "max_bandwidth is for all receivers together: tensorferry top METADATA shows whether others receive now"
_STATE = 64 << 20
_ROUNDS = 3
#: What is said of a source that runs and has published nothing, or has withdrawn it.
_NOTHING_NOW = re.compile("has withdrawn what it published|has never published anything|for a checkpoint to be allowed")
_DOCS = "https://github.com/tensorferry/tensorferry/blob/main/docs"
#: The page that helps, by the class of the error.
_PAGES: dict[type[TensorferryError], str] = {
    ConnectError: "guides/ports.md",
    FetchTimeout: "guides/faq.md#my-job-hangs",
    UnprovenSource: "reference/security.md",
}
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


def doctor(
    *metadata: str,
    quick: Switch = False,
    seconds: float | None = None,
    json: Json = False,
    trust: Trust = Trust(),  # noqa: B008 - it is frozen
    receiving: Receiving = Receiving(timeout=60.0),  # noqa: B008
) -> int:
    """Says which address a transport here would use and why, what limits it, and how fast it is.

    With METADATA of a running transport, its state is fetched once and the rate is compared with the speed of the
    interface. Ends with status 1 if something is bad.

    Args:
        metadata: of the peers to measure the way to
        quick: measure no rates on this machine
        seconds: receive from the first peer for so long only; the whole state, as without it, slows a heal that runs
        json: print the findings as one JSON document
        trust: what peers have to prove
        receiving: the deadline of the measurement with a peer, and its lanes
    """
    if seconds is not None and not 0.1 <= seconds <= 3600:
        raise InvalidArgument(f"--seconds must be between 0.1 and 3600, not {seconds}")
    findings: list[Any] = []
    checks = [_versions, _address, _interfaces, _ports, _memory, _limits, _kernel, *([] if quick else [_rates])]
    for check in checks:
        try:
            findings += check()
        except Exception as e:  # A check that cannot look must not keep the others from it.
            findings.append(Finding(check.__name__.strip("_"), _WARN, f"cannot be checked: {type(e).__name__}: {e}"))
    if metadata:
        findings += _check_peer(metadata, trust, receiving, seconds)
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
    from importlib import metadata as packages

    wanted = {}
    for requirement in packages.requires("tensorferry") or []:
        # Those of extras count where the package is there.
        if found := re.match(r"(torch|torchft|megatron-core)\b\s*\(?([<>=!~0-9.,\s]+)", requirement):
            wanted[found[1]] = found[2].replace(" ", "").strip(",")
    for name, specifier in wanted.items():
        try:
            version = packages.version(name)
        except packages.PackageNotFoundError:
            if name == "torch":
                yield Finding(name, _BAD, "is not installed", f"pip install 'torch{specifier}'")
            continue
        if _fits(version, specifier):
            yield Finding(name, _GOOD, f"{version}, of {specifier}")
        else:
            yield Finding(name, _BAD, f"{version} was not tested: {specifier} is", f"pip install '{name}{specifier}'")


def _fits(version: str, specifier: str) -> bool:
    """Whether ``version`` is in ``specifier``, of which the operators >=, < and == are known."""
    number = _number(version)
    for part in specifier.split(","):
        found = re.fullmatch(r"(>=|<|==)([0-9.]+)", part)
        if found is None:
            return False
        operator, bound = found[1], _number(found[2])
        shown = number[: len(bound)] if operator == "==" else number
        if not {">=": shown >= bound, "<": shown < bound, "==": shown == bound}[operator]:
            return False
    return True


def _number(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _address() -> Iterator[Finding]:
    own = addresses.listening_addresses(None)
    listening = next(iter(own), None)
    where = f"only on {', '.join(own)}, as TENSORFERRY_INTERFACE asks" if own else "on all addresses"
    yield Finding("listens", _GOOD, where)
    name, given = socket.gethostname(), setting(ADVERTISE)
    started = time.perf_counter()
    try:
        found = addresses.resolved(name)
        text, took = ", ".join(found), time.perf_counter() - started
        slow = took > _SLOW_LOOKUP_S
        remedy = "set TENSORFERRY_ADVERTISE, or add the name to /etc/hosts: every lookup takes as long" if slow else ""
        yield Finding("name lookup", _WARN if slow else _GOOD, f"{name} is {text}, found in {took:.3f} s", remedy)
    except FetchTimeout:
        took = time.perf_counter() - started
        remedy = "repair the name server, or set TENSORFERRY_ADVERTISE to a name or address of this host"
        yield Finding("name lookup", _BAD, f"no name server has answered for {name} within {took:.1f} s", remedy)
    except ConnectError:
        yield Finding("name lookup", _GOOD, f"{name} is not known to the name server")
    try:
        host = addresses.advertised_host(None, listening)
    except InvalidArgument as e:
        yield Finding("advertises", _BAD, str(e), "correct TENSORFERRY_ADVERTISE")
        return
    if given:
        why = f"TENSORFERRY_ADVERTISE={given}"
    elif listening:
        why = "the only address that is listened on"
    elif host == name:
        why = "this host's name, which leads to an address that others can use"
    else:
        why = (
            "the address of the interface with the default route, since this host's name leads to no address for others"
        )
    if host.startswith("127.") or host in ("::1", "localhost"):
        remedy = (
            "set TENSORFERRY_ADVERTISE or TENSORFERRY_INTERFACE to the name, address or network that peers can reach"
        )
        yield Finding("advertises", _WARN, f"{host}, which no other host can reach: {why}", remedy)
    else:
        yield Finding("advertises", _GOOD, f"{host}: {why}")


def _interfaces() -> Iterator[Finding]:
    for name, address in addresses.interfaces():
        speed = addresses.interface_speed(address)
        rated = "of unknown speed" if speed is None else f"rated at {console.amount(speed[1])}/s"
        yield Finding("interface", _GOOD, f"{name} {address}, {rated}")


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
        text = f"{variable} is {ports[0]}-{ports[1]}"
        if ports[0] <= high and ports[1] >= low:
            remedy = f"choose ports outside of {low}-{high}, from which the system takes those of outgoing connections"
            yield Finding("ports", _WARN, text, remedy)
        else:
            yield Finding("ports", _GOOD, text)


def _memory() -> Iterator[Finding]:
    available, limit = _available_memory(), _memory_limit()
    if available is not None and limit is not None:
        text = f"{console.amount(available)} available of {console.amount(limit)} that this process can have"
        yield Finding("memory", _GOOD, text)
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as e:
        yield Finding("/dev/shm", _WARN, f"is not there: {e}", "torch's data loaders need it; tensorferry does not")
        return
    free, size = shm.f_bavail * shm.f_frsize, shm.f_blocks * shm.f_frsize
    small = size <= 64 << 20
    remedy = "torch's data loaders may need more (docker run --shm-size=8g); tensorferry does not" if small else ""
    text = f"{console.amount(free)} of {console.amount(size)} free"
    yield Finding("/dev/shm", _WARN if small else _GOOD, text, remedy)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < 1024
    remedy = "raise it (ulimit -n): a server may have 512 connections" if few else ""
    yield Finding("descriptors", _WARN if few else _GOOD, f"{_limit(soft)} of at most {_limit(hard)}", remedy)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"{console.amount(soft) if soft != resource.RLIM_INFINITY else 'no'} limit"
    yield Finding("locked memory", _GOOD, f"{text}; what is locked for an accelerator does not count")


def _limit(number: int) -> str:
    return "any number" if number == resource.RLIM_INFINITY else str(number)


def _kernel() -> Iterator[Finding]:
    release = os.uname().release
    old = _number(release) < (5, 1)
    text = "before Linux 5.1 a receiver on this machine can write to its own shared memory" if old else ""
    yield Finding("kernel", _WARN if old else _GOOD, release, text)
    setting = _text("/sys/kernel/mm/transparent_hugepage/enabled")
    never = "[never]" in setting
    remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: fresh memory then costs fewer page faults"
    shown = setting.strip() or "there is no such setting"
    yield Finding("huge pages", _WARN if never else _GOOD, shown, remedy if never else "")
    scope = _text("/proc/sys/kernel/yama/ptrace_scope").strip()
    yield Finding("ptrace", _GOOD, f"scope {scope or 'not restricted'}; shared memory works under every setting")


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _rates() -> Iterator[Finding]:
    from .. import rates

    yield Finding("copy in memory", _GOOD, f"{console.amount(rates.copy_rate(_STATE))}/s by one thread")
    for what, _, median, least, most in rates.measure(_STATE, _ROUNDS):
        text = f"{console.amount(median)}/s ({console.amount(least)} to {console.amount(most)}), one process to itself"
        yield Finding(what, _GOOD, text)


def _failed(error: TensorferryError) -> Finding:
    """Returns the finding for a receive from a peer that has failed."""
    text = message_of(error)
    if _NOTHING_NOW.search(text):
        remedy = "it is reached; a torchft job publishes its state only while a replica heals, so this is normal there"
        return Finding("peer", _WARN, f"publishes nothing now: {text}", remedy)
    page = next((page for kind, page in _PAGES.items() if isinstance(error, kind)), "reference/errors.md")
    return Finding("peer", _BAD, f"{type(error).__name__}: {text}", f"see {_DOCS}/{page}")


def _verdict(share: float) -> str:
    """Returns the verdict on a rate that is this share of an interface's speed."""
    return _BAD if share < _BAD_SHARE else _WARN if share < _LOW_SHARE else _GOOD


def _rail(rail: RailRate) -> Finding:
    """Returns the finding for one rail, measured by itself: one pair of addresses, there and here."""
    if not rail.here:
        remedy = "repair the network to it, or leave it out with advertise= at the source: receivers try it each time"
        return Finding("rail", _BAD, f"nothing arrives from {rail.there}: {rail.trouble}", remedy)
    text = f"{rail.there} to {rail.here} at {console.amount(rail.rate)}/s by itself"
    if not rail.expected:
        return Finding("rail", _GOOD, f"{text}; the speeds of its links are not known")
    share = rail.rate / rail.expected
    verdict = _verdict(share)
    remedy = "" if verdict == _GOOD else "check its cable, switch port and settings, and what else uses it"
    measured = f"{rail.measured}: {console.amount(rail.expected)}/s"
    return Finding("rail", verdict, f"{text}, {share:.0%} of {measured}", remedy)


def _check_peer(
    metadata: tuple[str, ...], trust: Trust, receiving: Receiving, seconds: float | None
) -> Iterator[Finding]:
    """Receives the peer's state, or for ``seconds``, and rates the opening, each rail by itself, and each route."""
    from ..._native import _check_machine_has
    from ..sources import Peers, open_source

    started = time.perf_counter()
    try:
        peers = Peers.of(metadata, trust)
        urls = peers.urls if seconds is None else peers.urls[:1]
        remote, step = open_source(urls, peers.step, trust, receiving)
        opened = time.perf_counter() - started
        try:
            rails: list[RailRate] = []
            if seconds is None:
                rails = rail_rates(remote)
                _check_machine_has(sum(remote.sizes), "the state of the peer")
                _, report = remote.fetch()
            else:
                # Of several addresses that of the host may be one where nobody answers.
                there = remote.address or addresses.resolved(urlsplit(urls[0]).hostname or "")[0]
                sample = remote.measure(there, seconds)
        finally:
            remote.close()
    except TensorferryError as e:
        yield _failed(e)
        return
    yield from map(_rail, rails)
    slow = opened > _SLOW_OPENING_S
    yield Finding("peer", _WARN if slow else _GOOD, f"step {step}, opened in {opened:.3f} s", _LATE if slow else "")
    limit = _max_bandwidth(urls)
    if seconds is not None:
        nbytes, took, here = sample
        yield _route(_amount(nbytes, took), nbytes, took, (here, there), limit)
        return
    took, several = report.fetching_seconds, len(report.routes) > 1
    text = f"{_amount(report.bytes, took)} over {counted(report.lanes, 'connection', 'connections')}"
    if several:
        yield Finding("peer", _GOOD, f"{text}, by {len(report.routes)} routes{_limited(limit)}")
    if report.same_host:
        yield Finding("peer", _GOOD, f"{text}, by shared memory{_limited(limit)}")
    for route, nbytes in zip(report.routes, report.route_bytes, strict=True):
        if not several:
            yield _route(text, report.bytes, took, route, limit)
        elif limit:
            yield Finding("peer", _GOOD, f"{_amount(nbytes, took)} from {route[1]}")
        else:
            yield _route(_amount(nbytes, took), nbytes, took, route, 0.0)


def _amount(nbytes: int, took: float) -> str:
    return f"{console.amount(nbytes)} at {console.amount(nbytes / max(took, 1e-9))}/s"


def _max_bandwidth(urls: list[str]) -> float:
    """Returns the limit of all sources together in bytes per second; 0 if one has none, or does not say."""
    from .. import fleet

    limits = []
    for url in urls:
        (peer,) = fleet.peers_of(url)
        fleet.ask(peer)
        limits.append(peer.value("max_bandwidth_bytes_per_second"))
    return sum(limits) if all(limits) else 0.0


def _limited(limit: float) -> str:
    """Returns the words for a source's limit; empty if it has none."""
    return f", limited by the source's max_bandwidth of {console.amount(limit)}/s" if limit else ""


def _route(text: str, nbytes: int, took: float, route: tuple[str, str], limit: float) -> Finding:
    """Returns the finding for what came by a route, held against the source's limit or the speed of the interface."""
    (here, there), rate = route, nbytes / max(took, 1e-9)
    text = f"{text} from {there}"
    speed = addresses.interface_speed(here)
    if limit and (speed is None or limit < speed[1]):
        shared = rate < limit * _LOW_SHARE
        return Finding("peer", _WARN if shared else _GOOD, text + _limited(limit), _SHARED if shared else "")
    if speed is None:
        return Finding("peer", _GOOD, f"{text}; the speed of the interface of {here} is not known")
    share = rate / speed[1]
    verdict = _verdict(share)
    if took < 1.0 and verdict != _GOOD:
        verdict, remedy = _WARN, "the state is too small to say: measure with one that takes a second or more"
    elif verdict == _GOOD:
        remedy = ""
    else:
        remedy = "check the network, or choose another route with interface= or advertise= at the source"
    rated = f"{speed[0]} here is rated at {console.amount(speed[1])}/s"
    return Finding("peer", verdict, f"{text}: {share:.0%}, since {rated}", remedy)
