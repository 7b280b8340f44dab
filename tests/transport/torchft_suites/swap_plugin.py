"""pytest plugin that runs torchft's own tests with another class in HTTPTransport's place, and proves that it did.

Loaded with ``-p swap_plugin``, before any test module is imported. Two environment variables steer it:
``SWAP_TRANSPORT`` names the class (``module:Class``), ``SWAP_REPORT`` the file that receives the counts as JSON.
The methods are counted on the classes themselves, so a reference that escaped the swap is counted as well: the
session fails if torchft's own class was constructed even once, or if any torchft module still names it at the end.
"""

from __future__ import annotations

import functools
import importlib
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

STOCK_NAME = "torchft.checkpointing.http_transport:HTTPTransport"
COUNTED = {"__init__": "built", "send_checkpoint": "sent", "recv_checkpoint": "received"}


def load_class(name: str) -> type:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def count_calls(cls: type, counts: Counter[str]) -> None:
    """Wrap the constructor, send and receive of a class, in place."""

    def counted(method: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return method(*args, **kwargs)

        return call

    for name, what in COUNTED.items():
        setattr(cls, name, counted(getattr(cls, name), what))


def torchft_modules() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torchft" and module is not None:
            yield module


def holders(cls: type) -> list[str]:
    """The names under which torchft's modules, its test modules included, refer to a class."""
    return sorted(
        f"{module.__name__}.{attribute}"
        for module in torchft_modules()
        for attribute, value in list(vars(module).items())
        if value is cls
    )


STOCK = http_transport.HTTPTransport
OURS = load_class(os.environ["SWAP_TRANSPORT"])
SWAPPED = OURS is not STOCK
REPLACED = holders(STOCK)
outcomes: Counter[str] = Counter()
failed: list[dict[str, str]] = []
counts: dict[str, Counter[str]] = {}

for _cls in {STOCK, OURS}:
    counts[f"{_cls.__module__}:{_cls.__qualname__}"] = Counter(dict.fromkeys(COUNTED.values(), 0))
    count_calls(_cls, counts[f"{_cls.__module__}:{_cls.__qualname__}"])

if SWAPPED and not hasattr(OURS, "_checkpoint_lock"):
    # One of these tests asks the lock of torchft's class whether requests wait.
    OURS._checkpoint_lock = property(lambda self: SimpleNamespace(w_locked=lambda: self._disallowed))

for _holder in REPLACED:
    _module, _, _attribute = _holder.rpartition(".")
    setattr(sys.modules[_module], _attribute, OURS)


def failures() -> list[str]:
    if not SWAPPED:
        return []
    found = [f"{name} still is torchft's own class" for name in holders(STOCK)]
    if built := counts[STOCK_NAME]["built"]:
        found.append(f"torchft's own class was constructed {built} times")
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
    report = {"counts": counts, "replaced": REPLACED, "failures": failures(), "outcomes": outcomes, "failed": failed}
    Path(os.environ["SWAP_REPORT"]).write_text(json.dumps(report), encoding="utf-8")
