"""``tensorferry top``: a live table of a fleet, from the counters of its transports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InvalidArgument
from .. import exits
from ..flags import Json, Switch
from ..output import console

if TYPE_CHECKING:
    from ..fleet import Peer

#: The widest cell, and the longest cause: a hostile transport may say anything.
_WIDEST, _LONGEST_CAUSE = 60, 500
#: How many transports are asked at a time.
_AT_ONCE = 32
_HEADS = ("at", "step", "gate", "does", "to", "sends", "receives", "done", "healed", "failed", "last heal", "errors")
#: Why requests were refused whose peers knew the path: strangers with another path are no error of the fleet.
_REFUSED = ("no_secret", "other_secret")
_RIGHT = (1, 4, 5, 6, 7, 8, 9)
#: The columns that a narrow terminal goes without, the first to go first.
_FIRST_TO_GO = ("to", "done", "healed", "last heal", "sends", "receives", "step", "failed")


def top(*metadata: str, every: float = 2.0, once: Switch = False, json: Json = False) -> int:
    """Shows a fleet: who serves, who heals, how fast, and in which phase.

    Args:
        metadata: of transports, as metadata() returns it; or the address of a port for counters, such as node1:9400
        every: seconds between two looks
        once: look once, and end, with status 1 if one of them does not answer
        json: print each look as one JSON document on one line, with all counters
    """
    import concurrent.futures

    from .. import fleet

    if not metadata:
        raise InvalidArgument("give the metadata of at least one transport, or the address of its port for counters")
    if not 0.1 <= every <= 3600:
        raise InvalidArgument(f"--every must be between 0.1 and 3600 seconds, not {every}")
    peers = [peer for given in metadata for peer in fleet.peers_of(given)]
    with concurrent.futures.ThreadPoolExecutor(min(_AT_ONCE, len(peers))) as pool:
        try:
            _watch(peers, lambda: list(pool.map(fleet.ask, peers)), every, once, json)
        except exits.Terminated:
            raise
        except KeyboardInterrupt:
            # The ordinary end of a table that goes on for ever.
            return exits.OK
    return exits.NO if once and any(peer.trouble for peer in peers) else exits.OK


def _watch(peers: list[Peer], ask: Callable[[], Any], every: float, once: bool, as_json: bool) -> None:
    """Asks and shows all peers every few seconds, for ever unless ``once``: as JSON, as text or as a live table."""
    if once or as_json:
        while True:
            ask()
            if as_json:
                console.out_json([_peer_fields(peer) for peer in peers])
            else:
                console.out_table(_HEADS, [_row(peer) for peer in peers], _RIGHT)
            if once:
                return
            time.sleep(every)
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False, transient=False) as live:
        while True:
            ask()
            live.update(_table(peers, live.console.width), refresh=True)
            time.sleep(every)


def _does(peer: Peer) -> str:
    """Returns the cell that says what a transport is doing: whether it heals, sends, or has requests waiting."""
    if peer.is_keeper:
        return _keeps(peer)
    phases = [phase for phase in ("open", "fetch", "build") if peer.value("receiving_phase", phase) > 0]
    doing = [f"heals ({', '.join(phases)})"] if phases else []
    if peer.value("receivers"):
        doing.append("sends")
    if peer.value("swarm_members"):
        doing.append(f"swarm of {peer.value('swarm_members'):.0f}")
    if peer.value("waiting_requests"):
        doing.append(f"{peer.value('waiting_requests'):.0f} wait")
    return ", ".join(doing) or "-"


def _keeps(peer: Peer) -> str:
    """Returns the cell that says what a keeper holds, what it has refused, and which of its buddies answer."""
    used, limit = (console.amount(peer.value(f"keeper_memory_{which}_bytes")) for which in ("used", "limit"))
    snapshots = sum(peer.labelled("keeper_snapshots").values())
    doing = [f"{snapshots:.0f} snapshots, {used} of {limit}"]
    if buddies := peer.labelled("keeper_buddy_up"):
        doing.append(f"{sum(buddies.values()):.0f} of {len(buddies)} buddies")
    return ", ".join(doing)


def _row(peer: Peer) -> Sequence[str]:
    """Returns the cells of ``peer``, clean and not too wide. The last one, of its errors, has no other beside it."""
    return [*(console.clean(cell)[:_WIDEST] for cell in _cells(peer)), console.clean(_errors(peer))[:_LONGEST_CAUSE]]


def _errors(peer: Peer) -> str:
    """Returns why ``peer`` does not answer, by class and cause; or what has failed there, and what it has refused."""
    if peer.trouble:
        return f"{peer.error}: {peer.trouble}"
    errors = [f"{count} {error}" for error, count in peer.failures.items()]
    if again := peer.value("receive_retries_total"):
        errors.append(f"{again:.0f} ranges fetched again")
    if refused := sum(peer.labelled("keeper_refused_total").values()):
        errors.append(f"{refused:.0f} snapshots refused")
    if refused := sum(peer.value("refused_total", reason) for reason in _REFUSED):
        errors.append(f"{refused:.0f} requests refused")
    return ", ".join(errors) or "-"


def _cells(peer: Peer) -> Sequence[str]:
    """Returns a peer's row of the table."""
    if peer.trouble:
        return peer.shown, *["-"] * (len(_HEADS) - 2)
    total = peer.value("receiving_total_bytes")
    steps = peer.labelled("keeper_newest_step" if peer.is_keeper else "step")
    step = f"{max(steps.values()):.0f}" if steps else "-"
    last = "-"
    if ("last_receive_step", "") in peer.values:
        seconds = {phase: peer.value("last_receive_seconds", phase) for phase in ("open", "fetch", "build")}
        shares = "+".join(f"{seconds[phase]:.2f}" for phase in seconds)
        rate = console.amount(peer.value("last_receive_bytes_per_second"))
        senders = peer.value("last_receive_senders")
        last = f"step {peer.value('last_receive_step'):.0f} in {shares} s, {rate}/s"
        last += f" from {senders:.0f}" if senders > 1 else ""
    return (
        peer.shown,
        step,
        "keeper" if peer.is_keeper else "open" if peer.value("allowed") else "closed",
        _does(peer),
        f"{peer.value('receivers'):.0f}",
        f"{console.amount(peer.rates[0])}/s" if peer.rates[0] else "-",
        f"{console.amount(peer.rates[1])}/s" if peer.rates[1] else "-",
        f"{100 * peer.value('receiving_bytes') / total:.0f} %" if total else "-",
        f"{peer.value('receives_total', 'healed'):.0f}",
        f"{peer.value('receives_total', 'failed'):.0f}",
        last,
    )


def _fitting(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Returns the numbers of the columns that fit side by side into ``width`` columns of a terminal."""
    widths = [max(len(cell) for cell in column) for column in zip(_HEADS, *rows, strict=True)]
    chosen = list(range(len(_HEADS)))
    empty = [head for head, *cells in zip(_HEADS, *rows, strict=True) if {*cells} <= {"-", "0"}]
    # What says nothing of any peer goes before what says something.
    for head in sorted(_FIRST_TO_GO, key=lambda head: head not in empty):
        if sum(widths[number] + 2 for number in chosen) <= width + 2:
            break
        chosen.remove(_HEADS.index(head))
    return chosen


def _table(peers: list[Peer], width: int) -> Any:
    """Returns the live table, and below it the causes, which a narrow column would break into pieces.

    A terminal of few columns is given fewer columns, and the names of those that it goes without.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    rows, causes = [list(_row(peer)) for peer in peers], []
    for peer, row in zip(peers, rows, strict=True):
        if peer.trouble:
            causes.append(Text(f"{peer.shown}: {row[-1]}", style="red"))
            row[-1] = peer.error
    chosen = _fitting(rows, width)
    for number in chosen:
        right, whole = number in _RIGHT, number in (0, len(_HEADS) - 1)
        table.add_column(_HEADS[number], justify="right" if right else "left", no_wrap=whole)
    if missing := [head for number, head in enumerate(_HEADS) if number not in chosen]:
        causes.insert(0, Text(f"not shown in {width} columns: {', '.join(missing)}", style="dim"))
    for peer, row in zip(peers, rows, strict=True):
        style = "red" if peer.trouble else "yellow" if peer.value("receiving") else ""
        table.add_row(*(Text(row[number], style=style) for number in chosen))
    return Group(table, *causes)


def _peer_fields(peer: Peer) -> dict[str, Any]:
    if peer.trouble:
        return {"at": peer.shown, "error": peer.error, "trouble": console.clean(peer.trouble)}
    counters = {f"{name}{{{label}}}" if label else name: value for (name, label), value in peer.values.items()}
    return {"at": peer.shown, "sent_per_second": peer.rates[0], "received_per_second": peer.rates[1], **counters}
