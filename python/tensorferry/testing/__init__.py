"""A fault suite for checkpoint transports: what networks, peers and processes do to them, and how receives end.

It tests any ``CheckpointTransport`` whose metadata is a URL, torchft's ``HTTPTransport`` included::

    python -m tensorferry.testing --transports tensorferry,torchft --repeats 3

:class:`FaultProxy` can be used alone, in other tests: it stands between a receiver and its source.
"""

from .matrix.candidates import BUILTIN, Candidate
from .matrix.catalogue import SCENARIOS
from .matrix.cell import Limits, Outcome
from .matrix.idle_crowd import IdleCrowd
from .matrix.report import broken_promises, format_markdown, format_table, from_json, to_json
from .matrix.run_matrix import run_matrix
from .matrix.scenario import Scenario
from .proxy.faults import (
    Answer,
    Delay,
    Divert,
    Drip,
    Duplicate,
    Fault,
    FlipByte,
    HalfOpen,
    OffsetFault,
    ReplaceHead,
    Reset,
    Truncate,
)
from .proxy.proxy import FaultProxy, ProxyCounters

__all__ = [
    "BUILTIN",
    "SCENARIOS",
    "Answer",
    "Candidate",
    "Delay",
    "Divert",
    "Drip",
    "Duplicate",
    "Fault",
    "FaultProxy",
    "FlipByte",
    "HalfOpen",
    "IdleCrowd",
    "Limits",
    "OffsetFault",
    "Outcome",
    "ProxyCounters",
    "ReplaceHead",
    "Reset",
    "Scenario",
    "Truncate",
    "broken_promises",
    "format_markdown",
    "format_table",
    "from_json",
    "run_matrix",
    "to_json",
]
