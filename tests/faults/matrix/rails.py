"""The scenarios of a source with two addresses, of which one does not do what it should."""

from __future__ import annotations

from ..proxy import faults
from .scenario import Scenario

DEEP = 300_000
"""An offset in the bodies of a connection that is in the middle of a block."""


def rail_scenarios() -> list[Scenario]:
    """Returns the scenarios. A receive does without the address, and takes about as long as without it."""
    rows: dict[str, tuple[str, faults.Fault]] = {
        "cut": ("is reset in the middle of each body", faults.Reset(at=DEEP)),
        "half-open": ("is silent from the middle of each body on", faults.HalfOpen(at=DEEP)),
        "silent": (
            "accepts connections, and drops all that is sent",
            faults.HalfOpen(of="stream", direction="request"),
        ),
        "slow": ("brings one byte each 0.1 s from the middle of each body on", faults.Drip(at=DEEP)),
        "delay": ("brings each 4 KiB after 20 ms", faults.Drip(at=0, size=4096, interval=0.02)),
        "flip": ("changes a byte of the first body", faults.FlipByte(at=DEEP, connections=range(2))),
        "garbage": ("answers with noise", faults.Answer(data=bytes(range(256)) * 16)),
    }
    return [
        *(
            Scenario(f"rail-{name}", f"a second address of the source {about}", rail=(fault,), prompt=0.5)
            for name, (about, fault) in rows.items()
        ),
        Scenario(
            "rail-only",
            "the address in the metadata accepts connections and never answers, and a second address does",
            (faults.HalfOpen(of="stream", direction="request"),),
            rail=(faults.Drip(at=0, size=64 << 10, interval=0.001),),
            prompt=0.5,
        ),
    ]
