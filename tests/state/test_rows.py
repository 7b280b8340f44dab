"""Tensors are described by native code where torch allows it, and by Python otherwise: both must agree."""

from __future__ import annotations

import gc
import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from leaves import CARRIED
from tensorferry.state import tree

pytestmark = [pytest.mark.timeout(60), pytest.mark.beyond_torchft]


def seen(state: Any, native: bool) -> dict[str, Any]:
    flat = tree.flatten(state, native)
    rows = flat.rows
    return {
        "tree": json.loads(flat.tree),
        "rows": list(zip(rows.names, rows.dtypes, rows.shapes, rows.sizes, rows.flags, strict=True)),
        "memory": [id(t) for t in rows.memory],
        "objects": [id(o) for o in flat.objects if isinstance(o, torch.Tensor)],
        "paths": flat.object_paths,
    }


@pytest.mark.parametrize("leaf", [leaf for leaf in CARRIED if not leaf.group], ids=lambda leaf: leaf.name)
def test_both_ways_read_every_leaf_alike(leaf: Any) -> None:
    state = leaf.state(leaf.value())
    assert seen(state, native=True) == seen(state, native=False)


def odd_tensors() -> dict[str, torch.Tensor]:
    whole = torch.arange(8.0)
    complex_ = torch.complex(torch.arange(4.0), torch.ones(4))
    hooked = torch.ones(3, requires_grad=True)
    hooked.register_hook(lambda grad: grad)
    marked = torch.ones(3)
    marked.note = "kept"  # type: ignore[attr-defined]
    return {
        "whole": whole,
        "the same": whole,
        "alias": whole.view(2, 4),
        "beginning": torch.arange(6.0)[:3],
        "end": torch.arange(6.0)[3:],
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "odd strides": torch.arange(3.0).as_strided((3, 1), (1, 7)),
        "conj": complex_.conj(),
        "neg": torch._neg_view(torch.arange(4.0)),
        "hooked": hooked,
        "marked": marked,
        "int1": torch.empty(3, dtype=torch.int8).view(torch.int1),
        "grad": torch.ones(2, requires_grad=True),
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "nine dimensions": torch.ones([1] * 9),
    }


def test_both_ways_read_odd_tensors_alike() -> None:
    state = odd_tensors()
    natively = seen(state, native=True)
    assert natively == seen(state, native=False)
    plain = {"whole", "grad", "parameter", "frozen", "scalar", "empty", "nine dimensions"}
    assert {name for name, *_ in natively["rows"]} == plain
    assert {name: flag for name, _, _, _, flag in natively["rows"] if flag != "0"} == {
        "grad": "2",
        "parameter": "3",
        "frozen": "1",
    }


DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_both_ways_read_every_dtype_alike(dtype: torch.dtype) -> None:
    try:
        value = torch.empty(64, dtype=torch.uint8).view(dtype)
    except RuntimeError:
        pytest.skip("torch cannot make a tensor of it from bytes")
    assert seen({"a": value, "again": value}, native=True) == seen({"a": value, "again": value}, native=False)


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch's tensors are read in Python"
)
def test_tensors_are_read_without_giving_them_a_dict() -> None:
    tensor, marked = torch.ones(3), torch.ones(3)
    marked.note = "kept"  # type: ignore[attr-defined]
    tree.flatten({"a": tensor, "b": marked})
    assert any(isinstance(held, dict) for held in gc.get_referents(marked))
    assert not any(isinstance(held, dict) for held in gc.get_referents(tensor))


def test_what_a_program_has_put_in_place_of_a_property_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's C functions are called directly only as long as torch itself would call them."""
    state = {"tensor": torch.ones(3), "parameter": nn.Parameter(torch.ones(3))}
    assert tree.flatten(state).rows.flags == "03"
    with monkeypatch.context() as patch:
        patch.setattr(nn.Parameter, "is_neg", lambda _: True, raising=False)
        assert tree.flatten(state).rows.names == ["tensor"]
        patch.setattr(torch.Tensor, "is_neg", lambda _: True)
        assert tree.flatten(state).rows.names == []
    with monkeypatch.context() as patch:
        patch.setattr(nn.Parameter, "requires_grad", property(lambda _: False))
        assert tree.flatten(state).rows.flags == "01"
    assert tree.flatten(state).rows.flags == "03"


def test_leaves_are_found_again_by_what_they_are() -> None:
    whole = torch.arange(8.0)
    state = {"whole": whole, "alias": whole.view(2, 4), "odd": torch.arange(6.0)[:3], "none": None}
    for native in (True, False):
        flat = tree.flatten(state, native)
        assert [flat.number_of(value) for value in state.values()] == [0, None, None, None]  # type: ignore[arg-type]
        assert [flat.rows.number_of(value) for value in state.values()] == [0, -1, -2, -3]
        assert flat.rows.number_of(torch.arange(8.0)) is None
        flat.rows.forget()
        assert flat.rows.number_of(whole) is None


@pytest.mark.parametrize("key", ['"', "\\", "\n", "\x7f", "é", "\U0001f980", "\ud800", "a\0b", "", "__metadata__"])
def test_keys_are_written_as_json_writes_them(key: str) -> None:
    for kind in (dict, OrderedDict):
        state = kind({key: torch.ones(1), "b": {"c": torch.ones(2)}})
        flat = tree.flatten(state)
        assert list(tree.unflatten(flat.tree, flat.plain, flat.objects)) == [key, "b"]
        assert seen(state, native=True) == seen(state, native=False)
        assert len(set(flat.rows.names)) == 2
        assert all(n and "\0" not in n and n != "__metadata__" for n in flat.rows.names)


def test_order_of_an_ordered_dict_is_its_own() -> None:
    state = OrderedDict(a=torch.ones(1), b=torch.ones(2))
    state.move_to_end("a")
    assert tree.flatten(state).rows.names == ["b", "a"]
