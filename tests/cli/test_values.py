"""The comparison of leaves in memory, which ``diff`` does where digests do not suffice."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

from tensorferry.cli import exits
from tensorferry.cli.leaves import values
from tensorferry.cli.leaves.values import are_same
from tensorferry.errors import SystemRefused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.beyond_torchft


class Box:
    """An object that holds others, and has no ``==`` of its own."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class Hostile:
    def __reduce__(self) -> Any:
        raise ValueError("it cannot be pickled")


def quantized(scale: float) -> torch.Tensor:
    numbers = torch.tensor([1, 2, 3], dtype=torch.int8)
    return torch._make_per_tensor_quantized_tensor(numbers, scale, 0)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_quantized_tensors_in_an_object_differ_in_their_scale_alone() -> None:
    # What the comparison makes of each, such as its scale, may come to lie where that of the one before was.
    for count in range(2, 10):
        scales = [0.1 * (n + 1) for n in range(count)]
        box = Box([quantized(scale) for scale in scales])
        assert are_same(box, Box([quantized(scale) for scale in scales]))
        for n in range(count):
            others = [scale + 1 if i == n else scale for i, scale in enumerate(scales)]
            assert not are_same(box, Box([quantized(scale) for scale in others])), (count, n)


@pytest.mark.parametrize("error", [SystemRefused(12, "this machine has no memory"), MemoryError()])
def test_no_memory_for_a_comparison_is_no_difference(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(values, "_check_machine_has", refuse)
    view = torch.arange(12.0).reshape(3, 4).t()
    with pytest.raises(type(error)):
        are_same(view, view.clone(memory_format=torch.preserve_format))


def test_no_memory_for_a_comparison_has_a_status_of_its_own(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        # Other objects, so that the views are compared by their values.
        torch.save({"view": torch.arange(12.0).reshape(3, 4).t(), "name": name}, tmp_path / f"{name}.pt")
        assert run("convert", tmp_path / f"{name}.pt", tmp_path / f"{name}.safetensors").status == 0

    def refuse(*_: Any) -> None:
        raise SystemRefused(12, "this machine has no memory")

    monkeypatch.setattr(values, "_check_machine_has", refuse)
    done = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert done.status == exits.STATUS[SystemRefused], done


def test_objects_that_cannot_be_compared_differ() -> None:
    assert not are_same(Hostile(), Hostile())


ZERO, MINUS = 0.0, -0.0


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (ZERO, MINUS, False),
        (complex(0.0, 0.0), complex(0.0, -0.0), False),
        (float("nan"), float("nan"), True),
        (numpy.float64(0.0), numpy.float64(-0.0), False),
        (numpy.float32(0.0), numpy.float32(-0.0), False),
        (numpy.array([0.0]), numpy.array([-0.0]), False),
        (numpy.array([float("nan"), 1.0]), numpy.array([float("nan"), 1.0]), True),
        (Decimal("0"), Decimal("-0"), False),
        (Box([1, ZERO]), Box([1, MINUS]), False),
        (Box([1, MINUS]), Box([1, MINUS]), True),
        ({ZERO}, {MINUS}, False),
        ({1}, {True}, False),
        ({8, 0}, {0, 8}, True),
        (frozenset("ab"), frozenset("ba"), True),
        (Counter("aab"), Counter("baa"), True),
    ],
)
def test_bits_are_compared(a: Any, b: Any, same: bool, run: Callable[..., Any], tmp_path: Path) -> None:
    assert are_same(a, b) == same
    assert are_same({"x": [a]}, {"x": [b]}) == same
    if isinstance(a, float | complex) and not isinstance(a, numpy.generic):
        for name, value in (("a", a), ("b", b)):
            torch.save({"x": value, "w": torch.ones(1)}, tmp_path / f"{name}.pt")
        assert run("diff", tmp_path / "a.pt", tmp_path / "b.pt").status == (exits.OK if same else exits.NO)
