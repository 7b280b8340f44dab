"""``tensorferry top``: a live table of a fleet, from the counters of its transports."""

from __future__ import annotations

import concurrent.futures
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..._validate import readable
from ...errors import InvalidArgument
from .. import console, exits
from ..peers import Peer, ask, peers_of

#: The longest cell: a hostile transport may say anything.
_LONGEST = 300
#: How many transports are asked at a time.
_AT_ONCE = 32
_HEADS = ("at", "step", "gate", "does", "sends", "receives", "done", "healed", "failed", "last heal", "trouble")
_RIGHT = (1, 4, 5, 6, 7, 8)
#: Why requests were refused whose peers knew the path: strangers with another path are no error of the fleet.
_REFUSED = ("no_secret", "other_secret")


def top(*metadata: str, every: float = 2.0, once: bool = False, json: bool = False) -> int:
    """Shows a fleet: who serves, who heals, how fast, and in which phase.

    Args:
        metadata: what metadata() of each transport returns, or the address of its port for counters, such as node1:9400
        every: seconds between two readings
        once: read once, and exit with 1 if a transport does not answer
        json: print all counters of each reading as one JSON document on one line
    """
    if not metadata:
        raise InvalidArgument("give the metadata of at least one transport, or the address of its port for counters")
    if not 0.1 <= every <= 3600:
        raise InvalidArgument(f"--every must be between 0.1 and 3600 seconds, not {every}")
    peers = [peer for given in metadata for peer in peers_of(given)]
    with concurrent.futures.ThreadPoolExecutor(min(_AT_ONCE, len(peers))) as pool:
        try:
            while True:
                list(pool.map(ask, peers))
                if json:
                    console.out_json([_fields(peer) for peer in peers])
                else:
                    if not once and console.is_terminal(sys.stdout):
                        print("\x1b[H\x1b[J", end="")
                    console.out_table(_HEADS, [_row(peer) for peer in peers], _RIGHT)
                if once:
                    return exits.NO if any(peer.trouble for peer in peers) else exits.OK
                time.sleep(every)
        except exits.Terminated:
            raise
        except KeyboardInterrupt:
            # The ordinary end of a table that goes on for ever.
            return exits.OK


def _row(peer: Peer) -> Sequence[str]:
    """Returns the cells of a peer."""
    if peer.trouble:
        return peer.shown, *["-"] * (len(_HEADS) - 2), peer.trouble[:_LONGEST]
    is_keeper = ("keeper_memory_limit_bytes", "") in peer.values
    steps = peer.labelled("keeper_newest_step" if is_keeper else "step")
    total = peer.value("receiving_total_bytes")
    return (
        peer.shown,
        f"{max(steps.values()):.0f}" if steps else "-",
        "keeper" if is_keeper else "open" if peer.value("allowed") else "closed",
        (_keeps(peer) if is_keeper else _does(peer))[:_LONGEST],
        *(f"{readable(rate)}/s" if rate else "-" for rate in peer.rates),
        f"{100 * peer.value('receiving_bytes') / total:.0f} %" if total else "-",
        f"{peer.value('receives_total', 'healed'):.0f}",
        f"{peer.value('receives_total', 'failed'):.0f}",
        _last_heal(peer),
        _failures(peer)[:_LONGEST],
    )


def _does(peer: Peer) -> str:
    """Returns what a transport is doing: whether it heals, sends, or has requests waiting."""
    phases = [phase for phase in ("open", "fetch", "build") if peer.value("receiving_phase", phase) > 0]
    doing = [f"heals ({', '.join(phases)})"] if phases else []
    if receivers := peer.value("receivers"):
        doing.append(f"sends to {receivers:.0f}")
    if waiting := peer.value("waiting_requests"):
        doing.append(f"{waiting:.0f} wait")
    return ", ".join(doing) or "-"


def _keeps(peer: Peer) -> str:
    """Returns what a keeper holds."""
    used, limit = (readable(peer.value(f"keeper_memory_{which}_bytes")) for which in ("used", "limit"))
    return f"{sum(peer.labelled('keeper_snapshots').values()):.0f} snapshots, {used} of {limit}"


def _last_heal(peer: Peer) -> str:
    """Returns how long the last heal took, how fast it was, and from how many senders it came."""
    if ("last_receive_step", "") not in peer.values:
        return "-"
    step, seconds = peer.value("last_receive_step"), sum(peer.labelled("last_receive_seconds").values())
    rate, senders = peer.value("last_receive_bytes_per_second"), peer.value("last_receive_senders")
    return f"step {step:.0f} in {seconds:.2f} s, {readable(rate)}/s from {senders:.0f}"


def _failures(peer: Peer) -> str:
    """Returns what has failed at a peer by class, the most frequent first, and what it has refused."""
    failures = sorted(peer.labelled("receive_failures_total").items(), key=lambda one: (-one[1], one[0]))
    found = [f"{count:.0f} {error}" for error, count in failures if count]
    if refused := sum(peer.value("refused_total", reason) for reason in _REFUSED):
        found.append(f"{refused:.0f} requests refused")
    return ", ".join(found) or "-"


def _fields(peer: Peer) -> dict[str, Any]:
    if peer.trouble:
        return {"at": peer.shown, "trouble": console.clean(peer.trouble)}
    counters = {f"{name}{{{label}}}" if label else name: value for (name, label), value in peer.values.items()}
    return {"at": peer.shown, "sent_per_second": peer.rates[0], "received_per_second": peer.rates[1], **counters}
