"""The grammar of a state's tree: what stands below a node, and which objects the node itself names. Needs no torch.

docs/reference/format.md describes the grammar. ``tree.py`` writes it, and ``rust/wire`` checks received trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from ..errors import ProtocolError

#: A node as JSON has it: a number for a leaf, an object or a list for a container.
Node = Any


#: How a node is reached from the one above it: by a key of a dict (text, a number, a truth value, ``None``, or ``["r",
#: n]`` for an object), by a position, or not by a step at all: a dict below its attributes or its factory.
Step: TypeAlias = Literal["key", "index", "same"]


def children(node: Node) -> Iterator[tuple[Step, Any, Node]]:
    """Yields the nodes right below a container, each with the step to it and the key or position.

    Raises:
        ProtocolError: it is no container of the grammar
    """
    match node:
        case dict(members) | ["o", dict(members)]:
            for key, value in members.items():
                yield "key", key, value
        case ["l" | "t", *values] | ["n" | "q", _, *values]:
            for number, value in enumerate(values):
                yield "index", number, value
        case ["d", _, list(pairs)]:
            for pair in pairs:
                if type(pair) is not list or len(pair) != 2:
                    raise ProtocolError("the tree has a dict whose items are not pairs")
                yield "key", *pair
        case ["f" | "a", _, value]:
            yield "same", None, value
        case bool():
            raise ProtocolError("the tree has a truth value where a node belongs")
        case _:
            raise ProtocolError("the tree has a node of an unknown kind")


def objects_of(node: Node) -> list[int]:
    """Returns the numbers of the objects that a container itself names: its class, factory, attributes and keys.

    They are places in the list of objects, from 0 on; a leaf ``n < 0`` is the object at place ``-n - 1``.
    """
    if type(node) is not list:
        return []
    if node[0] == "d":
        return [key[1] for key, _ in node[2] if type(key) is list]
    return [node[1]] if node[0] in "fan" else []
