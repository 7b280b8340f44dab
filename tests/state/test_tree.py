"""The text of a tree is decoded to the state; malformed text raises an error that says where."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import tensorferry
from tensorferry.pickles.allowlist import Allowed
from tensorferry.state import tree

pytestmark = [pytest.mark.timeout(60), pytest.mark.beyond_torchft]

Pair = collections.namedtuple("Pair", "one two")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-1", Pair),
        (' {"x" : 0 , "\\u00e9\\"": [ "l" , 1 , 0 ] } ', {"x": "a", 'é"': ["b", "a"]}),
        ('["t"]', ()),
        ('["t",0,["t",1]]', ("a", ("b",))),
        ('["o",{"z":0,"a":1}]', collections.OrderedDict(z="a", a="b")),
        ('["n",0,0,1]', Pair("a", "b")),
        ('["q",null,0]', collections.deque(["a"])),
        ('["q",1,0,1]', collections.deque(["b"], 1)),
        ('["f",1,{"x":0}]', collections.defaultdict(list, x="a")),
        ('["d","d",[[1,0],[25,1],[true,0],[null,1],[-3,0],["s",1],[["r",2],0]]]', None),
        (f'["d","d",[[{2**53 - 1},0],[{1 - 2**53},1],[-0,0]]]', {2**53 - 1: "a", 1 - 2**53: "b", 0: "a"}),
        ('["d","o",[[2,0],[1,1]]]', collections.OrderedDict([(2, "a"), (1, "b")])),
    ],
)
def test_every_container_is_made(text: str, expected: Any) -> None:
    made = tree.unflatten(text, ["a", "b"], [Pair, list, "r"])
    if expected is None:
        assert list(made.items()) == [(1, "a"), (25, "b"), (None, "b"), (-3, "a"), ("s", "b"), ("r", "a")]
        assert [type(key) for key in made] == [int, int, type(None), int, str, str]
        return
    assert made == expected
    assert type(made) is type(expected)
    assert getattr(made, "maxlen", None) == getattr(expected, "maxlen", None)
    assert getattr(made, "default_factory", None) == getattr(expected, "default_factory", None)
    if isinstance(expected, dict):
        assert list(made) == list(expected)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", '{"a":0', '["l",0', "0 0", "-0", '["x"]', "[0]", '["d","d",[[["t",1],0]]]', '{"a":0,}', "[" * 300,
        '["q",99999999999999999999,0]', f'["d","d",[[{2**53},0]]]', f'["d","d",[[{-(2**53)},0]]]',
        '["d","d",[[1.5,0]]]',
    ],
)  # fmt: skip
def test_text_that_is_not_a_tree_is_named(text: str) -> None:
    with pytest.raises(tensorferry.errors.ProtocolError, match="the source's tree is malformed at byte"):
        tree.unflatten(text, ["a"], [])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('["d","d",[[["r",0],0]]]', "dict .*TypeError"),
        ('["n",0,0]', "namedtuple of a class that is none"),
        ('["q",18446744073709551615,0]', "deque .*OverflowError"),
        ('["f",0,{}]', "defaultdict .*TypeError"),
        ('["f",0,["o",{"x":0}]]', "defaultdict whose items are no dict"),
        ('["a",0,["l"]]', "dict whose attributes are no dict"),
    ],
)
def test_what_cannot_be_made_is_named(text: str, what: str) -> None:
    with pytest.raises(tensorferry.errors.ProtocolError, match=f"has a {what}"):
        tree.unflatten(text, ["a"], [[]])


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "key",
    [10**5000, ("x" * 1_000_000,) * 100_000, (("y",) * 3000, 1, "x" * 2000), frozenset([b"z" * 5000]), Mute()],
    ids=["integer", "tuple of texts", "tuple of tuples", "frozenset", "no text"],
)
def test_keys_that_have_no_text_are_named_by_their_type(key: Any) -> None:
    """The text of the second key would have a hundred gigabytes."""
    flat = tree.flatten({key: torch.ones(1), (1, "a"): 2})
    named = flat.object_paths[0]
    assert type(key).__name__ in named
    assert len(named) < 200
    assert len(flat.rows.names[0]) < 200
    assert list(flat.keys.values()) == ["builtins.tuple (1, 'a')"]
    assert tree.unflatten(flat.tree, flat.plain, flat.objects)[key] is flat.plain[0]


class Made:
    def __call__(self) -> int:
        return 7


@pytest.mark.parametrize(
    ("factory", "options", "known"),
    [
        (list, {}, True),
        (DeviceMesh, {}, False),
        (Made(), {}, False),
        (Made(), {"extra": [Made]}, True),
        (len, {}, False),
        (len, {"trust": True}, True),
    ],
)
def test_factories_are_those_that_a_pickle_may_name(factory: Any, options: dict[str, Any], known: bool) -> None:
    allowed = Allowed(**options)

    def make() -> Any:
        return tree.unflatten('["f",0,{"x":0}]', [1], [factory], allowed.defaultdict)

    if known:
        assert (make(), make().default_factory) == (collections.defaultdict(factory, x=1), factory)
        return
    with pytest.raises(tensorferry.errors.ProtocolError, match="a defaultdict whose factory is not a type"):
        make()
