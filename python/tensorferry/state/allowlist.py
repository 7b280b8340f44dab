"""Which globals a pickle from somewhere else may name.

Those of the reviewed table (``reviewed.py``), classes of the user's own (``safe_globals=[...]``, or
``torch.serialization.add_safe_globals``), or everything (``trust_pickle=True``).
"""

from __future__ import annotations

import _compat_pickle
import collections
from collections.abc import Iterable
from typing import Any

from torch import _weights_only_unpickler

from .._validate import boolean, brief, items
from ..errors import InvalidArgument, UnsafePickle
from . import reviewed

#: Modules that torch does not let a user's list name either.
_NEVER = ("sys", "os", "posix", "nt")


class Allowed:
    """The globals a pickle may name.

    Args:
        extra: classes and functions to allow besides the default list
        trust: allow everything: then whoever can answer as the source can run code here
    """

    def __init__(self, extra: Iterable[Any] = (), trust: bool = False) -> None:
        """See the class.

        Raises:
            InvalidArgument: ``extra`` holds something else
        """
        self._trust = boolean("trust_pickle", trust)
        self._extra: dict[tuple[str, str], Any] = {}
        for value in items("safe_globals", extra):
            module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
            if not isinstance(module, str) or not isinstance(name, str):
                raise InvalidArgument(f"safe_globals takes classes and functions, not {brief(value)}")
            # What was reviewed keeps its checks: they let through what an honest sender writes.
            if not reviewed.known(module, name):
                self._extra[module, name] = value
        self._users = {id(value) for value in self._extra.values()}

    @property
    def trusts(self) -> bool:
        """Whether everything is allowed."""
        return self._trust

    def allows(self, module: str, name: str) -> bool:
        """Whether ``module.name`` may be named."""
        return (
            self._trust
            or (module, name) in self._extra
            or reviewed.known(module, name)
            or f"{module}.{name}" in _torch_users()
        )

    def is_users(self, value: Any) -> bool:
        """Whether the user has allowed this very class or function, here or in torch's list."""
        if id(value) in self._users:
            return True
        users = _torch_users()
        return bool(users) and any([value is one for one in users.values()])

    def defaultdict(self, factory: Any) -> Any:
        """An empty ``defaultdict`` with a factory that a pickle may give one.

        Raises:
            Refused: it may not
        """
        # An instance of the user's own class may be a factory, too.
        if self._trust or self.is_users(type(factory)):
            return collections.defaultdict(factory)
        kind = reviewed.kind_of(reviewed.find("collections", "defaultdict"))
        if kind is None or kind.call is None:
            raise reviewed.Refused("a defaultdict")
        return kind.call(self, factory)

    def find(self, module: str, name: str, leaf: object = None) -> Any:
        """The object of this name, as reviewed or as the user gave it; ``leaf`` is the path of what needs it, if known.

        Nothing is imported or looked up because of what a peer writes: the name selects an object, or none.

        Raises:
            UnsafePickle: it is not allowed
        """
        # Old pickle protocols, torchft's among them, write the names that Python 2 had.
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        if (module, name) in self._extra:
            return self._extra[module, name]
        try:
            if reviewed.known(module, name):
                return reviewed.find(module, name)
        except LookupError as e:
            raise UnsafePickle(f"{refusal(module, name, leaf)} (this process has none)") from e
        users = _torch_users()
        if f"{module}.{name}" in users:
            return users[f"{module}.{name}"]
        raise UnsafePickle(refusal(module, name, leaf))


def refusal(module: str, name: str, leaf: object = None) -> str:
    """What to tell who meets a global that is not allowed, which the leaf at path ``leaf`` needs."""
    module, name = module[:200], name[:200]
    needed = f" for {leaf[:200]!r}" if isinstance(leaf, str) and leaf else ""
    return (
        f"the checkpoint's pickle names {module}.{name}{needed}, which is not on the allow-list; if you trust it, pass "
        f"safe_globals=[{module}.{name}] to HTTPTransport or the reader on the receiving side, or trust_pickle=True to "
        "allow everything"
    )


_read: tuple[Any, dict[str, Any]] = (None, {})


def _torch_users() -> dict[str, Any]:
    """What the user told torch: ``torch.serialization.add_safe_globals``.

    torch puts classes of its own there as well, so what is torch's and was not reviewed does not count.
    """
    global _read
    # torch makes a new set for each change.
    marked = _weights_only_unpickler._marked_safe_globals_set
    if _read[0] is not marked:
        _read = (marked, _users_of(_weights_only_unpickler._get_user_allowed_globals()))
    return _read[1]


def _users_of(listed: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in listed.items()
        if not name.startswith("torch.")
        and name.partition(".")[0] not in _NEVER
        and getattr(value, "__module__", "").partition(".")[0] not in ("torch", *_NEVER)
        and not reviewed.known(*name.rpartition(".")[::2])
    }
