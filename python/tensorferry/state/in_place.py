"""Receives into the receiver's own tensors: finds one for each leaf of the source's state, compares, and fills it.

Nothing is overwritten before the two states have been compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .._validate import brief
from ..errors import InvalidArgument, ProtocolError, StateMismatch
from ..memory.accelerator import ACCELERATOR, Accelerator
from ..memory.tensors import DTYPES, as_bytes, copy_into, why_not_writable
from ..net.report import InPlace
from . import aliases, tree
from .aliases import LeafMemory
from .manifest import describe, dtype_and_shape

if TYPE_CHECKING:
    from .build import StateBuilder

#: How many leaves a message names that exist on one side only, or that share memory.
_LISTED = 20
#: Where the other state is, for messages: that of a server, and that of a file or a keeper.
AT_SOURCE, IN_FILE = "at the source", "in the checkpoint"


def _matches(value: Any, dtype: str, shape: list[int]) -> bool:
    """Whether ``value`` is a tensor of this dtype and shape."""
    try:
        return isinstance(value, torch.Tensor) and (str(value.dtype), list(value.shape)) == (dtype, shape)
    except Exception:  # As in manifest.dtype_and_shape.
        return False


def _shape(value: torch.Tensor) -> torch.Size | None:
    try:
        return value.shape
    except Exception:  # As in manifest.dtype_and_shape.
        return None


def _shape_text(value: torch.Tensor) -> str:
    try:
        return f"{value.dtype} {list(value.shape)}"
    except Exception:  # As in manifest.dtype_and_shape.
        return f"a {type(value).__name__} without a shape"


def _kind(value: torch.Tensor) -> list[str]:
    """Returns what describes a tensor besides dtype and shape: values can be copied if this is equal for both."""
    try:
        local = getattr(value, "_local_tensor", None)
        properties = [
            "on the meta device" if value.device.type == "meta" else "",
            "nested" if value.is_nested else "",
            "quantised" if value.is_quantized else "",
            str(value.layout).removeprefix("torch."),
        ]
        if isinstance(local, torch.Tensor):
            properties += [f"a DTensor with the local tensor {_shape_text(local)}", *_kind(local)]
    except Exception:  # As in manifest.dtype_and_shape.
        return [f"a {type(value).__name__} of unknown layout"]
    return [one for one in properties if one]


def differing_kinds(live: torch.Tensor, value: torch.Tensor) -> tuple[str, str] | None:
    """Returns what two tensors of the same dtype and shape are besides, if values cannot be copied for that."""
    described = dtype_and_shape(value)
    kinds = _kind(live), _kind(value)
    if described is None or not _matches(live, *described) or kinds[0] == kinds[1]:
        return None
    return ", ".join(kinds[0]), ", ".join(kinds[1])


class InPlaceTargets:
    """The receiver's own tensors, to be filled in place.

    Their storages are held: if a tensor is given other memory meanwhile, writes still go to memory that is alive.

    Args:
        live: the state with these tensors
        accelerator: knows which of them are on a device
        may_stage: whether bytes may be copied to a device while others are still being received; otherwise they are
            copied at the end
        strict: whether each tensor of either state must have a counterpart in the other one
        name: what ``live`` came from, for messages

    Attributes:
        direct: for each entry that is received without a copy into its final place, the tensor with that place
        places: for those of these entries whose tensor is in host memory, its address
        staged: for those whose tensor is on an accelerator, a 1-D uint8 tensor over its storage
        fit: how the source's state matches, once it has been compared

    Raises:
        InvalidArgument: ``live`` is neither a tensor nor a container that can hold tensors
        UnsupportedLeaf: as for :func:`tree.flatten`
    """

    def __init__(
        self,
        live: Any,
        accelerator: Accelerator = ACCELERATOR,
        may_stage: bool = False,
        strict: bool = False,
        name: str = "state_dict",
    ) -> None:
        self.direct: dict[int, torch.Tensor] = {}
        self.places: dict[int, int] = {}
        self.staged: dict[int, torch.Tensor] = {}
        self.fit = InPlace(0, 0, "", "")
        self._there = AT_SOURCE
        self._accelerator = accelerator
        self._may_stage = may_stage
        self._strict = strict
        self._live = flat = tree.flatten(live)
        if flat.tree == "-1" and not isinstance(live, torch.Tensor):
            raise InvalidArgument(
                f"{name} gave {brief(live)}, which has no tensors to receive into: the live state is a tensor, a dict "
                "or another container with tensors in it"
            )
        self._memory = LeafMemory(flat)
        self._by_path = {
            path: number
            for number, path in tree.positions(flat.tree, flat.keys)
            if number >= 0 or isinstance(flat.leaf(number), torch.Tensor)
        }
        self._offered: dict[int, tuple[str, str, list[int]]] = {}
        self._waiting: Iterator[tuple[int | None, int]] = iter(())
        self._pairs: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self.is_written = False

    def assign(self, builder: StateBuilder, names: list[str], there: str = AT_SOURCE) -> None:
        """Compares the two states, then finds one of our tensors for each leaf of a container.

        Args:
            builder: the container's manifest and entries
            names: the names of its entries
            there: where the container is, for messages: ``AT_SOURCE`` or ``IN_FILE``

        Raises:
            StateMismatch: a leaf differs in dtype or shape, cannot be written to here, or shares memory here in another
                way than at the source; or, if ``strict`` was given, only one side has it. The message names all such
                leaves, of the last two kinds the first ones
            ProtocolError: the manifest does not describe its tensors, keys or shared memory as it should
            InvalidArgument: a graph is being captured on a device that is to be written to
        """
        self._there = there
        plain = builder.plain
        offered = {
            number: (names[i], str(DTYPES[builder.dtypes[i]]), list(builder.shapes[i]))
            for number, i in enumerate(plain)
        }
        keys, tensors = builder.manifest.described()
        offered |= {-number - 1: (path, dtype, shape) for number, path, dtype, shape in tensors}
        places = tree.positions(builder.manifest.tree, keys)
        self._match(places, offered, builder.manifest.shared())
        flat, owners = self._live, self._live.rows.owners
        # Only one of several tensors that share memory is filled directly.
        group = {layout.leaf: number for number, group in enumerate(self._memory.groups) for layout in group}
        used: set[int] = set()
        filled: set[int] = set()
        late = []
        for number, path in places:
            here = self._by_path.get(path)
            if here is None:
                continue
            target = flat.leaf(here)
            if number < 0 or here < 0 or not builder.size(plain[number]):
                late.append(target)
                continue
            entry = plain[number]
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
            StateMismatch: the states do not fit, as for :meth:`assign` and :meth:`take`, and nothing was overwritten;
                or torch cannot copy a tensor, and others may have new values
            UnsupportedLeaf: as for :func:`tree.flatten`
            InvalidArgument, torch.OutOfMemoryError: as for :meth:`write`
        """
        self._there = there
        flat = tree.flatten(state)
        names = flat.rows.names
        offered = {n: (names[n], str(t.dtype), list(t.shape)) for n, t in enumerate(flat.plain)}
        offered |= {-number - 1: (path, dtype, shape) for number, path, dtype, shape in describe(flat)}
        self._match(tree.positions(flat.tree, flat.keys), offered, LeafMemory(flat).groups)
        filled = tree.unflatten(flat.tree, flat.plain, flat.objects, self.take)
        self.write()
        return filled

    def _match(
        self,
        places: list[tuple[int, tuple[str, ...]]],
        offered: dict[int, tuple[str, str, list[int]]],
        theirs: aliases.Groups,
    ) -> None:
        """Compares the source's state with ours, and sets ``fit``.

        Args:
            places: the source's leaves and their paths, as of ``tree.positions``
            offered: path, dtype and shape of each of the source's tensors, by leaf number
            theirs: the source's leaves that share memory

        Raises:
            StateMismatch: as for :meth:`assign`
        """
        wrong = []
        landed: dict[int, int] = {}
        twice = []
        found = set()
        for number, path in places:
            here = self._by_path.get(path)
            if here is None or number not in offered:
                continue
            found.add(number)
            live = self._live.leaf(here)
            name, dtype, shape = offered[number]
            if not _matches(live, dtype, shape):
                wrong.append(f"{name}: {_shape_text(live)} here, {dtype} {shape} {self._there}")
            elif number >= 0 and here < 0 and (kind := _kind(live)) != ["strided"]:
                wrong.append(f"{name}: {', '.join(kind)} here, strided {self._there}")
            # A plain leaf had a place of its own for each element when it was flattened; to ask again takes 5 us.
            elif here < 0 and (why := why_not_writable(live)) is not None:
                wrong.append(f"{name}: cannot be written to here: {why}")
            elif landed.setdefault(here, number) != number:
                twice.append(((here, landed[here]), (here, number)))
        if not wrong:
            clashing = aliases.clashes(self._live, self._memory, theirs, landed, twice)
            wrong = [self._clash(places, one, two) for one, two in itertools.islice(clashing, _LISTED)]
        if self._strict:
            wrong += self._unmatched(places, offered, found)
        if wrong:
            raise StateMismatch(
                f"nothing was overwritten: the state {self._there} does not fit into this one; the leaves that differ:"
                + "".join(f"\n  {line}" for line in wrong)
            )
        theirs_alone = (path for number, path in places if number in offered and number not in found)
        theirs_first = (path for number, path in places if number in offered)
        there = next((tree.path_as_text(path) for path in itertools.chain(theirs_alone, theirs_first)), "nowhere")
        first = next(map(tree.path_as_text, self._by_path), "nowhere")
        self.fit = InPlace(len(found), len(offered), there, first)
        self._offered = offered
        self._waiting = iter([(self._by_path.get(path), number) for number, path in places])

    def _clash(self, places: list[tuple[int, tuple[str, ...]]], *landed: aliases.Landed) -> str:
        """Returns the message about two leaves that share memory, or about one whose own elements do."""
        # The first place of each of the two leaves, in the order of the source's tree.
        found: dict[aliases.Landed, str] = {}
        for number, path in places:
            one = (self._by_path.get(path, 0), number)
            if path in self._by_path and one in landed:
                found.setdefault(one, tree.path_as_text(path))
        paths = list(found.values())
        if len(paths) == 1:
            return f"{paths[0]}: several of its elements share memory here, but not in the same way {self._there}"
        return (
            f"{paths[0]} and {paths[1]}: they share memory here, but not {self._there}, or not in the same way; "
            "only one of them would keep its values"
        )

    def _unmatched(
        self,
        places: list[tuple[int, tuple[str, ...]]],
        offered: dict[int, tuple[str, str, list[int]]],
        found: set[int],
    ) -> list[str]:
        """Returns a line for each tensor that only one side has; ``found`` are the source's that we have, too."""
        theirs = {path for number, path in places if number in offered}
        only = [f"{name}: only {self._there}" for number, (name, *_) in offered.items() if number not in found]
        only += [f"{tree.path_as_text(path)}: only here" for path in self._by_path if path not in theirs]
        return only[:_LISTED] + ([f"and {len(only) - _LISTED} more"] if len(only) > _LISTED else [])

    def take(self, value: Any) -> Any:
        """Returns what belongs at the next place of the tree: our tensor for it, or ``value`` if we have none.

        Our tensor has the received values already, or :meth:`write` copies them from ``value``.

        Raises:
            ProtocolError: ``value`` is not what the source's manifest announced
            StateMismatch: our tensor is of another kind, or was given other memory during the receive
        """
        here, number = next(self._waiting)
        if here is None:
            return value
        # Plain tensors need no check: they were built from the manifest.
        if number < 0 and (offered := self._offered.get(number)) is not None and not _matches(value, *offered[1:]):
            raise ProtocolError(
                f"the source announced {self._shown(here)} as a tensor, {offered[1]} {offered[2]}, but sent something "
                "else"
            )
        if not isinstance(value, torch.Tensor):
            return value
        if number not in self._offered and (found := dtype_and_shape(value)) is not None:
            raise ProtocolError(
                f"the source did not announce {self._shown(here)} as a tensor, but sent one, {found[0]} {found[1]}"
            )
        live = self._live.leaf(here)
        if live is not value:
            self._compare_kinds(live, value, here)
        if self._memory.has_moved(here) or (
            live is not value and self._memory.start(here) and _shape(live) != _shape(value)
        ):
            raise StateMismatch(
                f"{self._shown(here)} was given other memory, or another shape, while its values were being received: "
                "it was not updated, and other tensors of the live state may have new values already; do not change "
                "the live state until the receive has ended, and receive again"
            )
        if live is not value:
            self._pairs.append((live, value, here))
        return live

    def _compare_kinds(self, live: torch.Tensor, value: torch.Tensor, here: int) -> None:
        """Refuses a received ``value`` that is of another kind than ``live``, our tensor with the number ``here``."""
        kinds = _kind(live), _kind(value)
        if kinds[0] != kinds[1]:
            raise StateMismatch(
                f"{self._shown(here)} is {', '.join(kinds[0])} in this state and {', '.join(kinds[1])} "
                f"{self._there}: it cannot be received in place, and other tensors may have new values already"
            )

    def _shown(self, here: int) -> str:
        return next(tree.path_as_text(path) for path, number in self._by_path.items() if number == here)

    def _copy_failed(self, here: int, error: Exception) -> StateMismatch:
        """Returns the error for a leaf whose tensor did not take the received values."""
        return StateMismatch(
            f"{self._shown(here)} cannot take the values that the source sent for it ({type(error).__name__}: "
            f"{error}): it was not updated, and other tensors may have new values already"
        )

    def write(self) -> None:
        """Copies the values that were not received directly into their final place.

        On an accelerator the copies run after the work that is queued there, and they are done when this returns.

        Raises:
            StateMismatch: torch cannot copy one of them; those before it have new values
            InvalidArgument: a graph is being captured on one of the devices
            torch.OutOfMemoryError: a device has no memory for a copy
        """
        pairs, self._pairs = self._pairs, []
        with self._accelerator.writing(self._accelerator.holding([live for live, *_ in pairs])):
            for live, value, here in pairs:
                try:
                    copy_into(live, value)
                except torch.OutOfMemoryError:
                    raise
                except Exception as e:
                    raise self._copy_failed(here, e) from e
        self.is_written = True
