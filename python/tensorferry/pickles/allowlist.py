"""The allow-list: the globals that a received pickle may name.

These are the globals of the reviewed table (``globals/table.py``) and those that the user has listed
(``safe_globals=[...]`` or ``torch.serialization.add_safe_globals``); with ``trust_pickle=True``, all.
"""

from __future__ import annotations

import _compat_pickle
import collections
import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import _weights_only_unpickler

from .._validate import boolean, brief, items
from ..errors import InvalidArgument, UnsafePickle
from .deadline import Deadline
from .globals import table
from .globals.kinds import Refused, Unlisted, kind_of, unlisted_in

#: Modules that torch does not accept from a user's list either.
_NEVER = ("sys", "os", "posix", "nt")
#: How many globals a message names.
_NAMED = 20

logger = logging.getLogger("tensorferry")


class Allowed:
    """The globals that a pickle may name.

    Args:
        extra: classes and functions to allow besides the default list
        trust: allow everything; anyone who can answer in place of the source can then run code here

    Raises:
        InvalidArgument: ``extra`` is no iterable of classes and functions, or ``trust`` is not a ``bool``
    """

    def __init__(self, extra: Iterable[Any] = (), trust: bool = False) -> None:
        self._trust = boolean("trust_pickle", trust)
        self._extra: dict[tuple[str, str], Any] = {}
        for value in items("safe_globals", extra):
            module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
            if not isinstance(module, str) or not isinstance(name, str):
                raise InvalidArgument(f"safe_globals takes classes and functions, not {brief(value)}")
            # A reviewed global keeps its checks, even if the user lists it: they accept what an honest sender writes.
            if not table.has(module, name):
                self._extra[module, name] = value
        self._users = {id(value) for value in self._extra.values()}
        #: Whether a ShardedTensor of another job is made, which belongs to no process group; otherwise it is refused.
        self.detaches = False
        #: Raises when the time for the pickles is over; ``None`` if they have no deadline, as those of files.
        self.check_time: Callable[[], None] | None = None
        #: Whether what is not allowed is an :class:`Unlisted` in the result, for :func:`refuse_unlisted`.
        self.spares = False

    def until(self, deadline: Deadline) -> Allowed:
        """Returns the same list, for the pickles of a receive that ends at ``deadline``."""
        made = copy.copy(self)
        made.check_time = deadline.check
        return made

    def detached(self) -> Allowed:
        """Returns the same list, by which ShardedTensors of other jobs are made, for one who takes their shards."""
        made = copy.copy(self)
        made.detaches = True
        return made

    def sparing(self) -> Allowed:
        """Returns the same list for one who takes a part of a state, and gives it to :func:`refuse_unlisted`."""
        made = copy.copy(self)
        made.spares = True
        return made

    @property
    def trusts(self) -> bool:
        """Whether everything is allowed."""
        return self._trust

    def allows(self, module: str, name: str) -> bool:
        """Whether a pickle may name ``module.name``."""
        return (
            self._trust
            or (module, name) in self._extra
            or table.has(module, name)
            or f"{module}.{name}" in _torch_user_globals()
        )

    def is_user_listed(self, value: Any) -> bool:
        """Whether the user has allowed exactly this class or function, in ``extra`` or in torch's list."""
        if id(value) in self._users:
            return True
        users = _torch_user_globals()
        return bool(users) and any([value is one for one in users.values()])

    def defaultdict(self, factory: Any) -> Any:
        """Returns an empty ``defaultdict`` with this factory.

        Raises:
            Refused: a pickle may not use this factory
        """
        # An instance of a class that the user has allowed may be a factory, too.
        if self._trust or self.is_user_listed(type(factory)):
            return collections.defaultdict(factory)
        kind = kind_of(table.find("collections", "defaultdict"))
        if kind is None or kind.call is None:
            raise Refused("a defaultdict")
        return kind.call(self, factory)

    def find(self, module: str, name: str, leaf: object = None) -> Any:
        """Returns the object that a global stands for; an :class:`Unlisted` if it is not allowed.

        A peer's text only selects a row of these lists: it never names a module to import or an attribute to look up.

        Args:
            module: the global's module
            name: its qualified name
            leaf: the path of a leaf that needs it, if known, for the message

        Raises:
            UnsafePickle: the global does not exist in this process
        """
        module, name = in_python_3(module, name)
        if (module, name) in self._extra:
            return self._extra[module, name]
        if table.has(module, name):
            try:
                return table.find(module, name)
            except LookupError as e:
                text = f"{refusal(Unlisted(module, name, leaf))} (it does not exist in this process)"
                raise UnsafePickle(text) from e
        return _torch_user_globals().get(f"{module}.{name}", Unlisted(module, name, leaf))


def in_python_3(module: str, name: str) -> tuple[str, str]:
    """Returns what a global is called now: pickles of old protocols, torch's for one, have the names of Python 2."""
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def refuse_unlisted(values: Iterable[Any]) -> None:
    """Refuses values that hold something that is not allowed, at any depth.

    Raises:
        UnsafePickle: they do; the message names all of it
    """
    if found := unlisted_in(values):
        raise UnsafePickle(refusal(*found))


def refusal(*refused: Unlisted) -> str:
    """Returns the message for globals that are not allowed."""
    names = [f"{one.module[:200]}.{one.name[:200]}" for one in refused[:_NAMED]]
    needed = [f" for {one.leaf[:200]!r}" if isinstance(one.leaf, str) and one.leaf else "" for one in refused]
    listed = " and ".join(map("".join, zip(names, needed, strict=False)))
    more = f" and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
    which, them = ("which is", "it") if len(refused) == 1 else ("which are", "them")
    return (
        f"the checkpoint's pickle names {listed}{more}, {which} not on the allow-list; if you trust {them}, pass "
        f"safe_globals=[{', '.join(names)}] to what receives or loads it, or trust_pickle=True to allow everything"
    )


#: The warning of a save whose state a load refuses.
REFUSED_LATER = "a load will refuse this state: %s"


class RefusalWarnings:
    """Warns, once for each, of globals of a state that those who read it with an allow-list will refuse.

    Args:
        allowed: that allow-list
        message: of the warning, with one ``%s`` for what is refused and what to do
        warned: the globals that others have warned of already, to which those of this object are added
    """

    def __init__(self, allowed: Allowed, message: str, warned: set[tuple[str, str]] | None = None) -> None:
        self._allowed, self._message = allowed, message
        self._warned = set() if warned is None else warned

    def warn(self, globals_: Mapping[tuple[str, str], str]) -> None:
        """Warns of ``globals_``: for each ``(module, name)`` the first leaf that needs it."""
        for module, name in globals_.keys() - self._warned:
            if not self._allowed.allows(module, name):
                self._warned.add((module, name))
                logger.warning(self._message, refusal(Unlisted(module, name, globals_[module, name])))


_read: tuple[Any, dict[str, Any]] = (None, {})


def _torch_user_globals() -> dict[str, Any]:
    """Returns by name what the user has given to ``torch.serialization.add_safe_globals``.

    torch adds classes of its own to the same list: classes of torch do not count.
    """
    global _read
    # torch creates a new set on each change, so its identity shows whether the cached answer is current.
    marked = _weights_only_unpickler._marked_safe_globals_set
    if _read[0] is not marked:
        _read = (marked, _without_torch(_weights_only_unpickler._get_user_allowed_globals()))
    return _read[1]


def _without_torch(listed: dict[str, Any]) -> dict[str, Any]:
    """Returns of the globals listed with torch those that are neither torch's own nor in the table."""
    return {
        name: value
        for name, value in listed.items()
        if not name.startswith("torch.")
        and name.partition(".")[0] not in _NEVER
        and getattr(value, "__module__", "").partition(".")[0] not in ("torch", *_NEVER)
        and not table.has(*name.rpartition(".")[::2])
    }
