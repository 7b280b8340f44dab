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
