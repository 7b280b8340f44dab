"""`make bench-accelerator` on a machine without an accelerator: it reports that, and it runs with a simulated one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stand_in import StandIn, stand_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.nightly, pytest.mark.beyond_torchft]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    monkeypatch.setattr(sys, "argv", ["accelerator.py", "--mib", "8", "--tensors", "4", "--rounds", "2", "--no-heals"])
    import accelerator

    return accelerator


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, bench: Any) -> Iterator[StandIn]:
    """Puts the tensors that the benchmark makes on its accelerator on the stand-in."""
    with stand_in() as device:

        def adopted(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def made(*arguments: Any, **options: Any) -> torch.Tensor:
                tensor = make(*arguments, **options)
                device.adopt(tensor)
                return tensor

            return made

        empty = torch.empty

        def unlocked(*shape: Any, **options: Any) -> torch.Tensor:
            options.pop("pin_memory", None)
            return empty(*shape, **options)

        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
        monkeypatch.setattr(torch, "rand", adopted(torch.rand))
        monkeypatch.setattr(torch, "zeros_like", adopted(torch.zeros_like))
        monkeypatch.setattr(torch, "empty", unlocked)
        monkeypatch.setattr(bench, "ACCELERATOR", device)
        monkeypatch.setattr("tensorferry.torchft.transport.ACCELERATOR", device)
        yield device


def test_it_runs_to_its_end(device: StandIn, bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main() == 0
    lines = capsys.readouterr().out.splitlines()
    names = [
        "0.01 GB in 4 tensors on cpu",
        "plain pinned copy ",
        "staging ",
        *(f"accelerator to {to}, {way}" for way in ("sockets", "shared memory") for to in ("host", "accelerator")),
        "staging runs at ",
    ]
    assert [line.startswith(name) for line, name in zip(lines, names, strict=True)] == [True] * len(names)
    # In each of three rounds, staging and four sends copy everything to the host, and two receives copy it back.
    assert sum(nbytes for nbytes, _ in device.copies) == 3 * 7 * (8 << 20)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("staging_s", "says"), [(1.0, "at 0.950 of a plain copy, which reaches 0.95"), (1.1, "misses")]
)
def test_it_says_whether_staging_is_good(
    staging_s: float,
    says: str,
    bench: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def timed(work: Callable[[], object]) -> float:
        work()
        return {"plain": 0.95, "staged": staging_s}.get(getattr(work, "__name__", ""), 1.0)

    monkeypatch.setattr(bench, "timed", timed)
    assert bench.main() == 0
    assert says in capsys.readouterr().out.splitlines()[-1]


def test_it_says_that_there_is_no_accelerator(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert bench.main() == 1
    assert "no accelerator here" in capsys.readouterr().err
