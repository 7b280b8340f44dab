"""The comparison of leaves in memory, which ``diff`` does where digests do not suffice."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from commands import write_distributed, write_torch_distributed
from tensorferry.cli import exits, values
from tensorferry.cli.values import are_same
from tensorferry.errors import SystemRefused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.beyond_torchft,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore:torch.distributed is disabled"),
]


class Hostile:
    def __reduce__(self) -> Any:
        raise ValueError("it cannot be pickled")


def quantized(scale: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), scale, 0, torch.quint8)


@pytest.mark.parametrize("error", [SystemRefused(12, "this machine has no memory"), MemoryError()])
def test_no_memory_for_a_comparison_is_no_difference(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(values, "_check_machine_has", refuse)
    view = torch.arange(12.0).reshape(3, 4).t()
    with pytest.raises(type(error)):
        are_same(view, view.clone(memory_format=torch.preserve_format))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (0.0, -0.0, False),
        (complex(0.0, 0.0), complex(0.0, -0.0), False),
        (float("nan"), float("nan"), True),
        (1, True, False),
        ({8, 0}, {0, 8}, True),
        (Counter("aab"), Counter("baa"), True),
        (Hostile(), Hostile(), False),
        (torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), 0.0]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), False),
        (torch.empty(3, device="meta"), torch.empty(3, device="meta"), True),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), True),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse(), False),
        (torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csr(), True),
        (quantized(0.5), quantized(0.5), True),
        (quantized(0.5), quantized(0.25), False),
    ],
)
def test_bits_are_compared(a: Any, b: Any, same: bool) -> None:
    assert are_same(a, b) == same


@pytest.mark.parametrize("write", [write_distributed, write_torch_distributed])
def test_what_lies_in_one_object_of_a_distributed_checkpoint_is_compared(
    write: Callable[..., None], run: Callable[..., Any], tmp_path: Path
) -> None:
    for name, last in (("a", 2), ("b", 3), ("same", 2)):
        write({"w": torch.ones(2), "numbers": [1, last]}, tmp_path / name)
    assert run("diff", tmp_path / "a", tmp_path / "same").status == exits.OK
    done = run("diff", tmp_path / "a", tmp_path / "b")
    assert (done.status, done.out) == (exits.NO, "numbers.1: the values differ\n")
