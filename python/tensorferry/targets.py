"""The receiver's own tensors, found for the leaves of a state that comes, and filled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from . import tree
from .accelerator import ACCELERATOR, Accelerator
from .errors import StateMismatch
from .tensors import DTYPES, copy_into, is_plain, obstacle, storage_key

if TYPE_CHECKING:
    from .state import Builder


def describe(flat: tree.Flat) -> list[list[Any]]:
    """``[object, path, dtype, shape]`` of every leaf that is a tensor but no plain one.

    By these a receiver compares before it fetches.
    """
    described = []
    for number, (value, path) in enumerate(zip(flat.objects, flat.object_paths, strict=True)):
        if isinstance(value, torch.Tensor):
            try:
                described.append([number, path, str(value.dtype), [int(dim) for dim in value.shape]])
            except Exception:  # Nested tensors and uninitialised parameters have no shape, and say so in many ways.
                continue
    return described


class Targets:
    """The receiver's own tensors, to be filled in place.

    Args:
        live: the state they are in
        accelerator: tells which of them are on a device
        lands: whether bytes can go on to a device while others come; else they are copied when all are here

    Attributes:
        direct: for entries whose bytes have their last place in a tensor, that tensor
        landing: those of them that are on an accelerator
    """

    def __init__(self, live: Any, accelerator: Accelerator = ACCELERATOR, lands: bool = False) -> None:
        """Takes ``live`` apart; nothing is assigned yet."""
        self.direct: dict[int, torch.Tensor] = {}
        self.landing: dict[int, torch.Tensor] = {}
        self._accelerator = accelerator
        self._lands = lands
        self._by_path: dict[tuple[str, ...], torch.Tensor] = {}
        self._waiting: Iterator[torch.Tensor | None] = iter(())
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        flat = tree.flatten(live)
        for number, path in tree.positions(flat.tree, flat.keys):
            value = flat.leaf(number)
            if isinstance(value, torch.Tensor):
                self._by_path[path] = value

    def assign(self, builder: Builder, names: list[str]) -> None:
        """Finds a tensor of ours for each leaf of a container, after comparing everything.

        Raises:
            StateMismatch: naming every leaf that both sides have with another dtype or shape, or that cannot be written
                to here
            InvalidArgument: a graph is being captured on a device that is to be written to
        """
        plain = builder.plain
        offered = {
            number: (names[i], str(DTYPES[builder.dtypes[i]]), list(builder.shapes[i]))
            for number, i in enumerate(plain)
        }
        keys, tensors = tree.described(builder.manifest)
        offered |= {-number - 1: (path, dtype, shape) for number, path, dtype, shape in tensors}
        places = tree.positions(builder.tree, keys)
        self._match(places, offered)
        used: set[int] = set()
        late = []
        for number, path in places:
            target = self._by_path.get(path)
            if target is None:
                continue
            if number < 0 or not builder.size(plain[number]) or not is_plain(target):
                late.append(target)
                continue
            on_device = self._accelerator.device_of(target.untyped_storage()) is not None
            key = storage_key(target.untyped_storage())
            if key in used or plain[number] in self.direct or (on_device and not self._lands):
                late.append(target)
                continue
            used.add(key)
            self.direct[plain[number]] = target
            if on_device:
                self.landing[plain[number]] = target
        self._accelerator.check(self._accelerator.holding(late))

    def fill(self, state: Any) -> Any:
        """Copies the tensors of ``state``, which is here already, into ours; returns it with ours in their places.

        Raises:
            StateMismatch: as for ``assign``
        """
        flat = tree.flatten(state)
        names = flat.rows.names
        offered = {n: (names[n], str(t.dtype), list(t.shape)) for n, t in enumerate(flat.plain)}
        offered |= {-number - 1: (path, dtype, shape) for number, path, dtype, shape in describe(flat)}
        self._match(tree.positions(flat.tree, flat.keys), offered)
        filled = tree.unflatten(flat.tree, flat.plain, flat.objects, self.take)
        self.write()
        return filled

    def _match(self, places: list[tuple[int, tuple[str, ...]]], offered: dict[int, tuple[str, str, list[int]]]) -> None:
        wrong = []
        for number, path in places:
            live = self._by_path.get(path)
            if live is not None and number in offered:
                name, dtype, shape = offered[number]
                if (str(live.dtype), list(live.shape)) != (dtype, shape):
                    wrong.append(f"{name}: {live.dtype} {list(live.shape)} here, {dtype} {shape} at the source")
                elif (why := obstacle(live)) is not None:
                    wrong.append(f"{name}: cannot be written to here: {why}")
        if wrong:
            raise StateMismatch(
                "nothing was overwritten: the source's state does not fit into this one; differing leaves:\n  "
                + "\n  ".join(wrong)
            )
        self._waiting = iter([self._by_path.get(path) for _, path in places])

    def take(self, value: Any) -> Any:
        """Our own tensor for the next place, which :meth:`write` fills with ``value``; or that where we have none."""
        live = next(self._waiting)
        if live is None or not isinstance(value, torch.Tensor):
            return value
        if live is not value:
            self._pairs.append((live, value))
        return live

    def write(self) -> None:
        """Copies what is not in its place yet.

        On accelerators that comes after what is queued there, and is done when this returns.
        """
        pairs, self._pairs = self._pairs, []
        with self._accelerator.writing(self._accelerator.holding([live for live, _ in pairs])):
            for live, value in pairs:
                copy_into(live, value)
