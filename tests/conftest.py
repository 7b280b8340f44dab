"""Fixtures shared by the Python tests: a transport under test, stock torchft transports, a process group.

`--transport torchft` runs the same tests against torchft's own HTTPTransport: what they expect is then checked against
the class we replace. Tests of what we do beyond it carry the mark `beyond_torchft` and are skipped there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch.distributed as dist

import forked
from child import Child
from networked import networked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# torch's stores ask the name server about each connection. A question without an answer then costs one second, not
# five, here and in every process that a test starts.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

hypothesis.settings.register_profile("fast", max_examples=30, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("slow", max_examples=1000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("fast")

TIMEOUT = timedelta(seconds=30)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--transport", choices=("tensorferry", "torchft"), default="tensorferry")
    parser.addoption("--kills", type=int, default=4, help="how often a save is killed in test_files.py")
    parser.addoption("--saver-kills", type=int, default=2, help="kills of each kind in test_killed.py")
    parser.addoption("--keeper-kills", type=int, default=2, help="kills of each kind in test_keeper*.py")
    parser.addoption("--pull-kills", type=int, default=1, help="how often a pull is killed in test_pull.py")
    parser.addoption("--object-kills", type=int, default=2, help="at how many requests test_kills.py kills a save")
    parser.addoption("--fault-schedules", type=int, default=2, help="schedules of faults for test_schedules.py")
    parser.addoption("--saves", type=int, default=10, help="how many saves are made beside readers")
    parser.addoption("--spread-states", type=int, default=12, help="random states for test_spread_tensors.py")
    parser.addoption("--pickle-seconds", type=float, default=2, help="how long test_hostile_pickles.py fuzzes")
    parser.addoption("--pickled-states", type=int, default=150, help="random states for test_native_pickles.py")
    parser.addoption("--convert-kills", type=int, default=1, help="how often a conversion is killed in test_outputs.py")
    parser.addoption("--every-verb", action="store_true", help="test_hostile.py runs each verb with each server")
    parser.addoption("--fuzz-runs", type=int, default=100, help="inputs for each target of fuzzing.py")
    parser.addoption("--fuzz-seed", type=int, default=1)


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the tests in the background ignores these, and so would every process that a test interrupts.
    defaults = [(signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)]
    for number, handler in [*defaults, (signal.SIGQUIT, signal.SIG_DFL)]:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    config.addinivalue_line("markers", "beyond_torchft: torchft's HTTPTransport does not do this")


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    """No test leaves another handler of Ctrl-C behind: a later one that interrupts itself would wait for ever."""
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is before


# Last, after pytest has left out what -m and -k do not choose.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        # Workers take files in this order: the longest ones first, so that none is left to one worker at the end.
        slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("nightly")}
        items.sort(key=lambda item: item.path not in slow)
    if config.getoption("--transport") == "torchft":
        skip = pytest.mark.skip(reason="torchft's HTTPTransport does not do this")
        # torchft's receiver keeps tensors in the memory of a bytes object, and it leaves sockets to the collector.
        known = [
            pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
            pytest.mark.filterwarnings("ignore::ResourceWarning"),
            pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
        ]
        for item in items:
            for mark in known:
                item.add_marker(mark)
            if item.get_closest_marker("beyond_torchft"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def ours(pytestconfig: pytest.Config) -> bool:
    return pytestconfig.getoption("--transport") == "tensorferry"


@pytest.fixture(scope="session")
def transport_class(ours: bool) -> Any:
    if ours:
        return pytest.importorskip("tensorferry").HTTPTransport
    return pytest.importorskip("torchft.checkpointing").HTTPTransport


@contextlib.contextmanager
def opening(cls: Any) -> Iterator[Callable[..., Any]]:
    """A constructor of transports that are shut down at the end."""
    opened = []

    def open_one(num_chunks: int = 0, timeout: timedelta = TIMEOUT, **options: Any) -> Any:
        opened.append(cls(timeout=timeout, num_chunks=num_chunks, **networked(options)))
        return opened[-1]

    try:
        yield open_one
    finally:
        for transport in opened:
            if hasattr(transport, "_server") and hasattr(transport._server, "server_close"):
                # torchft leaves its listening socket to the garbage collector, and its shutdown takes half a second.
                transport._server._BaseServer__shutdown_request = True
                transport._server.server_close()
            else:
                transport.shutdown()


@pytest.fixture
def open_transport(transport_class: Any, ours: bool) -> Iterator[Callable[..., Any]]:
    """Opens transports of the class under test. Options that torchft does not have are left out for it."""
    with opening(transport_class) as open_one:
        yield open_one if ours else lambda num_chunks=0, timeout=TIMEOUT, **_: open_one(num_chunks, timeout)


@pytest.fixture
def open_stock() -> Iterator[Callable[..., Any]]:
    """Opens transports of torchft itself."""
    with opening(pytest.importorskip("torchft.checkpointing").HTTPTransport) as open_one:
        yield open_one


@pytest.fixture
def child() -> Iterator[Child]:
    started = Child()
    yield started
    started.end()


@pytest.fixture
def forked_child() -> Iterator[Child]:
    """A child for scripts that ask nothing of a young interpreter: it takes a tenth of the time."""
    started = Child(forks=True)
    yield started
    started.end()


@pytest.fixture
def forked_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreters that a test lets others start are forked from one that has imported torch and the package."""
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def patience_with_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets replicas wait for their job's store: a connection may take seconds (RES_OPTIONS, above)."""
    monkeypatch.setattr("tensorferry.torchft.replica_sources._STORE_PATIENCE", 20.0)
    # Shorter than the process waits at its end.
    monkeypatch.setattr("tensorferry.torchft.replica_sources._CONNECT", timedelta(seconds=7))
