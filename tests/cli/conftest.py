"""A runner for the command, servers for what it fetches, and the forms of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from commands import TIMEOUT, Run, make_state, written
from networked import networked
from tensorferry import HTTPTransport, cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Runs the command in this process."""

    def run_command(*arguments: object) -> Run:
        capfd.readouterr()
        status = cli.main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Run(status, captured.out, captured.err)

    return run_command


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The state in each form, as read-only originals."""
    return written(make_state(), tmp_path_factory.mktemp("forms"))


@pytest.fixture
def publish() -> Iterator[Callable[..., str]]:
    """Publishes a state on this host; returns the metadata."""
    opened = []

    def publish_state(state: Any, step: int = 5, same_host: bool = False, **options: Any) -> str:
        transport = HTTPTransport(TIMEOUT, **networked({"interface": "127.0.0.1", "same_host": same_host, **options}))
        opened.append(transport)
        transport.send_checkpoint([1], step, state, TIMEOUT)
        return transport.metadata()

    yield publish_state
    for transport in opened:
        transport.shutdown()
