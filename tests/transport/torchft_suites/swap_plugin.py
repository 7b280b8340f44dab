"""pytest plugin that runs torchft's own tests with our class in HTTPTransport's place, and proves that it did.

Loaded with ``-p swap_plugin``, before any test module is imported. The environment variable ``SWAP_REPORT`` names the
file that receives the counts as JSON. The methods are counted on the classes themselves, so a reference that escaped
the swap is counted as well: the session fails if torchft's own class was constructed even once, or if any torchft
module still names it at the end.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torchft.checkpointing.http_transport as http_transport
import torchft.checkpointing.http_transport_bench
import torchft.manager  # noqa: F401 (both modules hold the class's name by the time it is swapped)

from tensorferry import HTTPTransport

if TYPE_CHECKING:
    from collections.abc import Callable

COUNTED = {"__init__": "built", "send_checkpoint": "sent", "recv_checkpoint": "received"}
STOCK = http_transport.HTTPTransport
outcomes: Counter[str] = Counter()
failed: list[dict[str, str]] = []


def count_calls(cls: type) -> Counter[str]:
    """Wraps the constructor, send and receive of a class, in place; returns how often each is called from now on."""
    counts = Counter(dict.fromkeys(COUNTED.values(), 0))

    def counted(method: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return method(*args, **kwargs)

        return call

    for name, what in COUNTED.items():
        setattr(cls, name, counted(getattr(cls, name), what))
    return counts


def holders() -> list[tuple[Any, str]]:
    """The names under which torchft's modules, its test modules included, refer to its own class."""
    modules = [one for name, one in list(sys.modules.items()) if name.partition(".")[0] == "torchft" and one]
    return [(module, name) for module in modules for name, value in list(vars(module).items()) if value is STOCK]


counts, of_stock = count_calls(HTTPTransport), count_calls(STOCK)
# One of these tests asks the lock of torchft's class whether requests wait.
HTTPTransport._checkpoint_lock = property(lambda self: SimpleNamespace(w_locked=lambda: self._disallowed))
for _module, _name in holders():
    setattr(_module, _name, HTTPTransport)


def failures() -> list[str]:
    found = [f"{module.__name__}.{name} still is torchft's own class" for module, name in holders()]
    if of_stock["built"]:
        found.append(f"torchft's own class was constructed {of_stock['built']} times")
    return found


def pytest_runtest_setup() -> None:
    # These tests draw weights unseeded; test_local_sgd_recovery fails with a draw whose ReLU lets nothing through.
    torch.manual_seed(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.outcome] += 1
    if report.failed:
        failed.append({"test": report.nodeid, "text": report.longreprtext + report.capstderr + report.caplog})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        outcomes["failed"] += 1


# Runs before the summary is printed and before the exit status is taken.
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if failures():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    report = {"counts": counts, "failures": failures(), "outcomes": outcomes, "failed": failed}
    Path(os.environ["SWAP_REPORT"]).write_text(json.dumps(report), encoding="utf-8")
