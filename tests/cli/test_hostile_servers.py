"""The verbs that ask running peers, against servers that mean harm: one line, a status, and nothing on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hostile_servers
from fuzzing import status
from tensorferry.cli import exits, fleet

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.beyond_torchft

MIB = 1 << 20
#: By verb, what it is given, with the hostile metadata in place of HOSTILE and that of the honest source of HONEST.
VERBS: dict[str, list[str]] = {
    "pull": ["pull", "HOSTILE", "-o", "OUTPUT", "--quiet"],
    "inspect": ["inspect", "HOSTILE"],
    "diff": ["diff", "HONEST", "HOSTILE"],
    "doctor": ["doctor", "HOSTILE"],
    "digests": ["inspect", "HOSTILE", "--digests", "--json"],
}
#: Servers that are only tried with `--every-verb`: others are much like them.
ALIKE = {
    *(f"cut after {length} bytes" for length in (12, 100, 400, 1000)),
    *(f"gone after {count} answers" for count in (1, 3)),
    *("closing", "status line without end", "body without end", "a page for people", "a bomb in parts", "too long"),
}


@pytest.fixture
def honest(publish: Callable[..., str]) -> str:
    return publish({"w": torch.ones(3 * MIB, dtype=torch.uint8), "b": torch.zeros(5)}, same_host=False)


def is_quiet(text: str) -> bool:
    """Whether a text has nothing that a terminal acts upon, but the ends of its lines."""
    return all(c == "\n" or c.isprintable() for c in text)


@pytest.mark.parametrize("name", hostile_servers.SERVERS)
def test_a_hostile_server_gets_a_line_and_a_status(
    name: str,
    run: Callable[..., Any],
    honest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    every = pytestconfig.getoption("--every-verb")
    if name in ALIKE and not every:
        pytest.skip("only with --every-verb")
    # In a short run a server meets one of the verbs that fetch, and those that answer everything alike also meet top.
    number = list(hostile_servers.SERVERS).index(name)
    verbs = list(VERBS) if every else [list(VERBS)[number % len(VERBS)]]
    if every:
        monkeypatch.setattr(hostile_servers, "many", 1_000_000)
    monkeypatch.setattr(fleet, "_PATIENCE_S", 0.3)
    output = tmp_path / "a"
    # What is only odd needs its time; the others would use up any.
    slow = name in hostile_servers.CONTENT
    with hostile_servers.SERVERS[name](honest) as hostile:
        values = {"HOSTILE": hostile, "HONEST": honest, "OUTPUT": str(output)}
        for verb in [*verbs, *(["top"] if every or name in hostile_servers.ANSWERS else [])]:
            given = (
                ["top", "HOSTILE", "--once"] if verb == "top" else [*VERBS[verb], "--timeout", "60" if slow else "0.4"]
            )
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
            told = run(*(values.get(argument, argument) for argument in given))
            grown = status("VmHWM") - before
            assert is_quiet(told.out + told.err), (verb, told)
            assert "Traceback" not in told.err, (verb, told)
            assert told.status != exits.BUG, (verb, told)
            if not slow and not (verb == "top" and told.status == exits.OK):
                assert told.status != exits.OK, (verb, told)
                assert len(told.err.splitlines()) <= 1, (verb, told)
                assert told.err or verb in ("doctor", "top"), (verb, told)
                assert not output.exists()
            # What a million leaves take is bounded by their number.
            assert grown < (2048 if every else 512) * MIB, (verb, f"{grown // MIB} MiB")
            output.unlink(missing_ok=True)


def test_a_redirect_leads_nowhere(run: Callable[..., Any], honest: str, tmp_path: Path) -> None:
    with (
        hostile_servers.Relay(honest, hostile_servers.unchanged) as elsewhere,
        hostile_servers.redirecting(elsewhere.metadata) as hostile,
    ):
        assert run("pull", hostile, "-o", tmp_path / "a", "--timeout", "2").status == exits.UNAVAILABLE
        assert elsewhere.requests == 0


@pytest.mark.waits
def test_a_wrong_step_is_refused_with_those_that_are_served(
    run: Callable[..., Any], publish: Any, tmp_path: Path
) -> None:
    five, seven = publish({"w": torch.ones(3)}), publish({"w": torch.ones(3)}, step=7)
    for sources, said in (([five], "but 5."), ([five, seven], "but 5, 7.")):
        told = run("pull", *sources, "-o", tmp_path / "a", "--step", "6", "--timeout", "5")
        assert told.status == exits.UNAVAILABLE
        assert told.err == (
            f"tensorferry: WrongStep: step 6 is not served, {said} Name one that is with --step, or leave --step out\n"
        )
    for step in ("99999999999999999999", "-9223372036854775809"):
        assert run("inspect", five, f"--step={step}").status == exits.USAGE
