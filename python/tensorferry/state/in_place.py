"""Receives into the receiver's own tensors: finds one for each leaf of the source's state, compares, and fills it.

Nothing is overwritten before the two states have been compared.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._validate import brief
from ..errors import InvalidArgument, ProtocolError, StateMismatch, UnsupportedLeaf
from ..memory.accelerator import ACCELERATOR, Accelerator
from ..memory.tensors import DTYPES, as_bytes, copy_into, count_as_written, why_not_writable
from ..net.report import InPlace
from ..pickles.allowlist import refuse_unlisted
from . import aliases, tree
from .aliases import LeafMemory
from .local_parts import local_tensors, spread_tensor
from .manifest import dtype_and_shape, kind_of
from .match import Match, tensors_in

if TYPE_CHECKING:
    from .build import StateBuilder

logger = logging.getLogger("tensorferry")

#: How many leaves a message names that exist on one side only, or that share memory.
_LISTED = 20
#: Where the other state is, for messages: that of a server, and that of a file or a keeper.
AT_SOURCE, IN_FILE = "at the source", "in the checkpoint"


class _Announced:
    """The tensors of a container's state, as its manifest and its header describe them."""

    def __init__(self, builder: StateBuilder, names: list[str]) -> None:
        manifest, plain = builder.manifest, builder.plain
        self.tree = manifest.tree
        self.keys, rows = manifest.described()
        self.groups = manifest.shared()
        self.count = len(plain)
        self._rows = {-number - 1: (path, (dtype, shape)) for number, path, dtype, shape in rows}
        self._kinds = {-number - 1: kind for number, kind in manifest.kinds().items()}
        #: The numbers of the tensors among the objects.
        self.tensors = dict.fromkeys([*self._rows, *self._kinds])
        self._builder, self._plain, self._names, self._parts = builder, plain, names, manifest.parts

    def name(self, number: int) -> str:
        """Returns the path of a tensor."""
        return self._names[self._plain[number]] if number >= 0 else self._rows.get(number, ("an object", None))[0]

    def dtype_and_shape(self, number: int) -> tuple[str, list[int]] | None:
        """Returns what :func:`manifest.dtype_and_shape` returns for a tensor."""
        if number < 0:
            return self._rows.get(number, ("", None))[1]
        entry = self._plain[number]
        return str(DTYPES[self._builder.dtypes[entry]]), list(self._builder.shapes[entry])

    def kind(self, number: int) -> str:
        """Returns what :func:`manifest.kind_of` returns for a tensor."""
        return self._kinds.get(number, "strided")

    def parts(self, number: int) -> list[Any] | None:
        """Returns what :func:`_parts_of` returns for a tensor."""
        return self._parts(self._rows[number][0]) if number in self._rows else None


class _Built:
    """The tensors of a state that is in memory; the methods are those of :class:`_Announced`."""

    def __init__(self, flat: tree.Flat) -> None:
        self.tree, self.keys, self.count = flat.tree, flat.keys, len(flat.plain)
        self.groups = LeafMemory(flat).groups
        self.tensors = dict.fromkeys(-n - 1 for n, one in enumerate(flat.objects) if isinstance(one, torch.Tensor))
        self._flat = flat

    def name(self, number: int) -> str:
        return self._flat.rows.names[number] if number >= 0 else self._flat.object_paths[-number - 1]

    def dtype_and_shape(self, number: int) -> tuple[str, list[int]] | None:
        return dtype_and_shape(self._flat.leaf(number))

    def kind(self, number: int) -> str:
        return kind_of(self._flat.leaf(number))

    def parts(self, number: int) -> list[Any] | None:
        return _parts_of(self._flat.leaf(number))

    def placements(self, number: int, live: Any) -> tuple[Any, Any] | None:
        """Returns the placements of ``live`` and of a tensor, if they differ."""
        placed = getattr(live, "placements", None), getattr(self._flat.leaf(number), "placements", None)
        return None if placed[0] == placed[1] or live.device_mesh.size() == 1 else placed


def _parts_of(value: Any) -> list[Any] | None:
    """Returns where the parts of a tensor begin in the whole one, and their shapes; ``None`` if it is not spread."""
    try:
        spread = spread_tensor(value)
    except UnsupportedLeaf:
        return [[None, list(local.shape)] for local in local_tensors(value)]
    return None if spread is None else [[list(box.offsets), list(box.sizes)] for box, _ in spread.parts]


def _text(described: tuple[str, list[int]] | None) -> str:
    return "a tensor without a shape" if described is None else f"{described[0]} {described[1]}"


def _shape(value: torch.Tensor) -> torch.Size | None:
    try:
        return value.shape
    except Exception:  # As in manifest.dtype_and_shape.
        return None


class InPlaceTargets:
    """The receiver's own tensors, to be filled in place.

    Their storages are held: if a tensor is given other memory meanwhile, writes still go to memory that is alive.

    Args:
        live: the state with these tensors
        accelerator: knows which of them are on a device
        may_stage: whether bytes may be copied to a device while others are still being received; otherwise they are
            copied at the end
        strict: whether each tensor of either state must have a counterpart in the other one; of a part, whether each
            path of ``live`` must
        name: what ``live`` came from, for messages
        is_part: whether only what ``live`` has is taken of the source's state
        kept: the identities of values in ``live`` that are left as they are
        must_fit: whether a state that does not fit is refused; otherwise it comes into fresh memory

    Attributes:
        direct: for each entry that is received without a copy into its final place, the tensor with that place
        places: for those of these entries whose tensor is in host memory, its address
        staged: for those whose tensor is on an accelerator, a 1-D uint8 tensor over its storage
        fit: how the source's state matches, once it has been compared
        match: the counterparts, likewise
        tree: the tree of the state that is built, likewise; :meth:`take` returns its leaves
        missing: the paths that only ``live`` has, likewise
        is_written: whether all values are in their final place

    Raises:
        InvalidArgument: ``live`` is neither a tensor nor a container that can hold tensors
    """

    match: Match

    def __init__(
        self,
        live: Any,
        accelerator: Accelerator = ACCELERATOR,
        may_stage: bool = False,
        strict: bool = False,
        name: str = "state_dict",
        is_part: bool = False,
        kept: Collection[int] = (),
        must_fit: bool = True,
    ) -> None:
        self.must_fit = must_fit
        self.direct: dict[int, torch.Tensor] = {}
        self.places: dict[int, int] = {}
        self.staged: dict[int, torch.Tensor] = {}
        self.fit = InPlace(0, 0, "", "")
        self.tree = ""
        self.missing: list[str] = []
        self.is_written = False
        self._accelerator = accelerator
        self._may_stage = may_stage
        self._strict = strict
        self._is_part, self._kept = is_part, kept
        if not isinstance(live, torch.Tensor | dict | list | tuple | deque):
            raise InvalidArgument(
                f"{name} gave {brief(live)}, which has no tensors to receive into: the live state is a tensor, a dict "
                "or another container with tensors in it"
            )
        self._live = live
        self._copies: list[tuple[torch.Tensor, torch.Tensor, str]] = []

    def assign(
        self, builder: StateBuilder, names: list[str], there: str = AT_SOURCE, objects: Sequence[Any] | None = None
    ) -> None:
        """Compares the two states, then finds one of our tensors for each leaf of a container.

        Args:
            builder: the container's manifest and entries
            names: the names of its entries
            there: where the container is, for messages: ``AT_SOURCE`` or ``IN_FILE``
            objects: the objects of its pickle, if they are known

        Raises:
            StateMismatch: a leaf differs in dtype, shape, kind or part, cannot be written to here, or shares memory
                here in another way than at the source; one side has a tensor where the other one has another value; or,
                if ``strict`` was given, only one side has it. The message names all such leaves, of the last two kinds
                the first ones
            ProtocolError: the manifest does not describe its tensors, keys or shared memory as it should
            InvalidArgument: a graph is being captured on a device that is to be written to
            UnsafePickle: of a part, an object of it holds something that is not on the allow-list
            UnsupportedLeaf: as for :func:`tree.flatten`
        """
        self._compare(_Announced(builder, names), there, objects)
        flat, owners = self._flat, self._flat.rows.owners
        # Only one of several tensors that share memory is filled directly.
        group = {layout.leaf: number for number, group in enumerate(self._memory.groups) for layout in group}
        used: set[int] = set()
        filled: set[int] = set()
        late = []
        for (number, target, _), here in zip(self.match.pairs, self._here, strict=True):
            if number < 0 or here < 0 or not builder.size(builder.plain[number]):
                late.append(target)
                continue
            entry = builder.plain[number]
            storage = owners[here]
            on_device = self._accelerator.device_of(storage) is not None
            filled_already = here in used or group.get(here) in filled or entry in self.direct
            # A tensor that was given other memory since it was flattened may have another size.
            if filled_already or flat.rows.size(here) != builder.size(entry) or (on_device and not self._may_stage):
                late.append(target)
                continue
            used.add(here)
            if here in group:
                filled.add(group[here])
            self.direct[entry] = target
            if on_device:
                self.staged[entry] = as_bytes(storage)
            else:
                self.places[entry] = flat.rows.address(here)
        self._accelerator.check(self._accelerator.holding(late))

    def fill(self, state: Any, there: str = AT_SOURCE) -> Any:
        """Copies the tensors of a received ``state`` into ours, and sets ``fit``.

        Args:
            state: the received state; it is not changed
            there: where it is from, for messages: ``AT_SOURCE`` or ``IN_FILE``

        Returns:
            A new state of the same structure, with our tensors where they have a counterpart in ``state``, and the
            leaves of ``state`` elsewhere.

        Raises:
            StateMismatch: the states do not fit, as for :meth:`assign`, and nothing was overwritten; or torch cannot
                copy a tensor, and others may have new values
            UnsupportedLeaf: as for :func:`tree.flatten`
            InvalidArgument, torch.OutOfMemoryError: as for :meth:`write`
        """
        flat = tree.flatten(state)
        self._compare(_Built(flat), there, flat.objects)
        filled = tree.unflatten(self.tree, self.take(flat.plain, flat.objects), flat.objects)
        self.write()
        return filled

    def give_up(self, error: StateMismatch) -> None:
        """Logs that the source's state comes into fresh memory, because of ``error``.

        Raises:
            StateMismatch: ``error``, if the state must fit, or may have been written to
        """
        if self.must_fit or self.fit.matched:
            raise error
        first, *leaves = str(error).splitlines()
        more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
        logger.warning("receiving into fresh memory: %s%s%s", first, leaves[0][1:] if leaves else "", more)

    def _compare(self, source: _Announced | _Built, there: str, objects: Sequence[Any] | None) -> None:
        """Compares the source's state with ours; raises as :meth:`assign`."""
        node = json.loads(source.tree)
        self.match = match = Match(
            node, self._live, source.tensors, source.count, there, source.keys, objects, self._is_part, self._kept
        )
        self._flat = flat = tree.flatten([live for _, live, _ in match.pairs])
        self._here: list[int] = json.loads(flat.tree)[1:]
        self._memory = LeafMemory(flat)
        self._source, self._there = source, there
        if objects is not None and self._is_part:
            refuse_unlisted([objects[place] for place in match.objects])
        wrong = match.wrong
        assigned: dict[int, int] = {}
        twice = []
        for (number, live, path), here in zip(match.pairs, self._here, strict=True):
            if (why := self._why_not(number, live, here)) is not None:
                wrong.append(f"{path or 'the state itself'}: {why}")
            elif assigned.setdefault(here, number) != number:
                twice.append(((here, assigned[here]), (here, number)))
        if not wrong:
            clashing = aliases.clashes(self._memory, source.groups, assigned, twice)
            wrong = [self._clash(one, two) for one, two in itertools.islice(clashing, _LISTED)]
        self.missing = [path for path, _ in match.alone]
        numbers = [*range(source.count), *source.tensors]
        found = {number for number, _, _ in match.pairs}
        if self._strict and not self._is_part:
            only = [f"{source.name(number)}: only {there}" for number in numbers if number not in found]
            only += [f"{path}: only here" for above, value in match.alone for path, _ in tensors_in(value, above)]
            wrong += only[:_LISTED] + ([f"and {len(only) - _LISTED} more"] if len(only) > _LISTED else [])
        if wrong:
            raise StateMismatch(
                f"nothing was overwritten: the state {there} does not fit into this one; the leaves that differ:"
                + "".join(f"\n  {line}" for line in wrong)
            )
        if self._strict and self._is_part and self.missing:
            raise StateMismatch(f"nothing was overwritten: the checkpoint is missing keys: {self.missing}")
        first = next((number for number in numbers if number not in found), next(iter(numbers), None))
        self.fit = InPlace(
            len(found),
            len(numbers),
            "nowhere" if first is None else source.name(first),
            match.pairs[0].path if match.pairs else next((path for path, _ in tensors_in(self._live)), "nowhere"),
        )
        self.tree = json.dumps(match.tree, separators=(",", ":"))
        count_as_written([live for _, live, _ in match.pairs])

    def _why_not(self, number: int, live: torch.Tensor, here: int) -> str | None:
        """Returns why our tensor ``live`` cannot take the values of the source's ``number``; ``None`` if it can."""
        source, there = self._source, self._there
        described = dtype_and_shape(live), source.dtype_and_shape(number)
        if described[0] != described[1]:
            return f"{_text(described[0])} here, {_text(described[1])} {there}"
        # A plain leaf had a place of its own for each element when it was flattened; to ask again takes 5 us.
        kinds = "strided" if here >= 0 else kind_of(live), source.kind(number)
        if kinds[0] != kinds[1]:
            return f"{kinds[0]} here, {kinds[1]} {there}"
        parts = None if here >= 0 else _parts_of(live), None if number >= 0 else source.parts(number)
        if parts[0] != parts[1]:
            texts = ["a whole tensor" if one is None else f"the parts {one}" for one in parts]
            return f"{texts[0]} here, {texts[1]} {there}, as [offsets, shape]"
        if number < 0 and isinstance(source, _Built) and (placed := source.placements(number, live)) is not None:
            return f"placements {placed[0]} here, {placed[1]} {there}"
        if here < 0 and (why := why_not_writable(live)) is not None:
            return f"cannot be written to here: {why}"
        return None

    def _clash(self, *clashing: aliases.Assignment) -> str:
        """Returns the message about two leaves that share memory, or about one whose own elements do."""
        # The first place of each of the two leaves, in the order of the source's tree.
        found: dict[aliases.Assignment, str] = {}
        for (number, _, path), here in zip(self.match.pairs, self._here, strict=True):
            if (here, number) in clashing:
                found.setdefault((here, number), path)
        paths = list(found.values())
        if len(paths) == 1:
            return f"{paths[0]}: several of its elements share memory here, but not in the same way {self._there}"
        return (
            f"{paths[0]} and {paths[1]}: they share memory here, but not {self._there}, or not in the same way; "
            "only one of them would keep its values"
        )

    def take(self, leaves: Sequence[Any], objects: Sequence[Any]) -> list[Any]:
        """Returns the leaves of ``tree``: the source's ``leaves``, and behind them our tensors.

        Ours have the received values already, or :meth:`write` copies them.

        Raises:
            ProtocolError: a leaf is not what the source's manifest announced
            StateMismatch: one of ours was given other memory during the receive
        """
        for (number, live, path), here in zip(self.match.pairs, self._here, strict=True):
            value = leaves[number] if number >= 0 else objects[-number - 1]
            # Plain tensors need no check: they were built from the manifest.
            if number < 0:
                self._check_announced(value, number, path)
            if self._memory.has_moved(here) or (
                live is not value and self._memory.start(here) and _shape(live) != _shape(value)
            ):
                raise StateMismatch(
                    f"{path} was given other memory, or another shape, while its values were being received: it was "
                    "not updated, and other tensors of the live state may have new values already; do not change the "
                    "live state until the receive has ended, and receive again"
                )
            if live is not value:
                self._copies.append((live, value, path))
        return [*leaves, *[live for _, live, _ in self.match.pairs]]

    def _check_announced(self, value: Any, number: int, path: str) -> None:
        """Refuses an object that is not the tensor that the source has announced."""
        announced = self._source.dtype_and_shape(number), self._source.kind(number)
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or (dtype_and_shape(value), kind_of(value)) != announced:
            raise ProtocolError(
                f"the source announced {path} as a tensor, {_text(announced[0])}, {announced[1]}, but sent something "
                "else"
            )

    def write(self) -> None:
        """Copies the values that were not received directly into their final place.

        On an accelerator the copies run after the work that is queued there, and they are done when this returns.

        Raises:
            StateMismatch: torch cannot copy one of them; those before it have new values
            InvalidArgument: a graph is being captured on one of the devices
            torch.OutOfMemoryError: a device has no memory for a copy
        """
        copies, self._copies = self._copies, []
        with self._accelerator.writing(self._accelerator.holding([live for live, *_ in copies])):
            for live, value, path in copies:
                try:
                    copy_into(live, value)
                except torch.OutOfMemoryError:
                    raise
                except Exception as e:
                    raise StateMismatch(
                        f"{path} cannot take the values that the source sent for it ({type(e).__name__}: {e}): it was "
                        "not updated, and other tensors may have new values already"
                    ) from e
        self.is_written = True
