"""With a name server that never answers, calls keep their deadline, and Ctrl-C ends them at once."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(120),
    pytest.mark.beyond_torchft,
]

SCRIPT = Path(__file__).with_name("silent.py")
RESOLVERS = Path("/etc/netns")
# How long the system's resolver takes by itself: two attempts of thirty seconds.
UNBOUNDED_S = 60
AT_ONCE_S = 2.5


@pytest.fixture(scope="module")
def attempt() -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs a door in a simulated host whose name server accepts questions and never answers."""
    host = f"tf{os.getpid()}n"
    folder = RESOLVERS / host
    commands = [("ip", "netns", "add", host), ("ip", "-n", host, "link", "set", "lo", "up")]
    try:
        folder.mkdir(parents=True)
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:2\n")
        (folder / "hosts").write_text("127.0.0.1 localhost\n")
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as reason:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"no network namespaces here: {reason}")

    command = ["ip", "netns", "exec", host, "unshare", "--uts", sys.executable, str(SCRIPT)]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(door: str, seconds: float = 1, interrupt: float | None = None) -> dict[str, Any]:
        assert program.stdin is not None
        assert program.stdout is not None
        print(json.dumps({"door": door, "seconds": seconds, "interrupt": interrupt}), file=program.stdin, flush=True)
        result = json.loads(program.stdout.readline())
        assert "status" not in result, "it failed"
        assert json.loads(program.stdout.readline()) == {"status": 0}
        return result

    try:
        yield run
    finally:
        program.kill()
        program.communicate(timeout=30)
        subprocess.run(("ip", "netns", "delete", host), capture_output=True, timeout=30, check=False)
        shutil.rmtree(folder, ignore_errors=True)


DOORS = ["ours", "stock", "peers"]


@pytest.mark.parametrize("door", DOORS)
def test_a_deadline_counts_the_lookup_of_a_name(door: str, attempt: Callable[..., dict[str, Any]]) -> None:
    result = attempt(door)
    assert result["ended"] == "FetchTimeout", result
    assert result["asked"], "no name server was asked"
    assert 0.9 < result["took"] < AT_ONCE_S, result
    assert "step 7" in result["message"]
    given = re.search(r"the whole receive was given ([\d.]+) s", result["message"])
    # A reader's time begins before its name is looked up.
    assert given is not None, result
    assert 0.5 < float(given[1]) <= 1, result
    assert "no name server has answered" in result["message"]
    assert "trainer.example" in result["message"]


@pytest.mark.parametrize("door", [*DOORS, "construction"])
def test_an_interrupt_ends_the_lookup_of_a_name(door: str, attempt: Callable[..., dict[str, Any]]) -> None:
    result = attempt(door, seconds=60, interrupt=0.3)
    assert result["ended"] == "KeyboardInterrupt", result
    assert result["took"] < 1.3, result


def test_construction_does_not_wait_for_a_name_server(attempt: Callable[..., dict[str, Any]]) -> None:
    result = attempt("construction")
    assert (result["ended"], result["asked"]) == ("returned", True), result
    assert result["took"] < AT_ONCE_S, result
    assert any("no name server has answered" in warning for warning in result["warnings"]), result


def test_the_process_does_not_wait_for_the_resolver_at_its_end(attempt: Callable[..., dict[str, Any]]) -> None:
    result = attempt("ours", seconds=0.2)
    # Processes of one machine share this clock, so that torch's import does not count.
    assert time.monotonic() - result["ended_at"] < UNBOUNDED_S - result["took"], "less than the resolver takes"
