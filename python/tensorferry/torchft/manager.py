"""``Manager``, torchft's class; replicas heal in place, from every healthy replica."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torchft.manager

from .. import _validate
from .replica_sources import ReplicaSources
from .transport import HTTPTransport

logger = logging.getLogger("tensorferry")

__all__ = ["Manager"]


class Manager(torchft.manager.Manager):  # type: ignore[misc]  # torchft has no types
    """torchft's ``Manager``; a replica that heals fetches from all healthy ones, into the tensors that it has.

    torchft assigns one healthy replica to each one that heals, and only that one sends. With this class in all
    replicas the others send too: a heal takes ranges from each of them, goes on when one dies, the assigned one
    included, and costs each healthy replica a share of the bytes. A replica that runs torchft's own ``Manager`` in the
    same job heals, and is healed from, as before.

    In a step in which somebody heals, every healthy replica calls the ``state_dict`` functions, as torchft does for
    the assigned one. The replicas must hold the same state: one whose state differs in structure or bytes (a position
    in the data, the state of a random generator) is left out, and what it sent is fetched again. At most eight
    replicas besides the assigned one send to one that heals. They find each other through the store that torchft's
    process groups use; if it does not answer, replicas heal as torchft assigns them, and a warning says so.

    A replica that heals calls the ``state_dict`` functions too, and what they return is received into. Tensors that
    only the source has, such as those of an optimizer that has not taken a step yet, and a state that does not fit come
    into fresh memory, and the log says so. The ``load_state_dict`` functions then get the live tensors themselves.
    With an asynchronous quorum, ``start_quorum`` waits for the end of the heal, until this replica has taken part once;
    a heal after that comes into fresh memory, because the training thread uses the tensors. A heal that fails midway is
    tried again in the next step; if there is no source by then, ``should_commit`` raises ``HalfReceived``.

    Args:
        arguments: as for torchft's class. A ``checkpoint_transport`` must be a ``tensorferry.HTTPTransport`` for all
            this; by default one is made with the ``timeout`` that is given here.
        in_place: receive into the tensors of the ``state_dict`` functions. ``False`` leaves that to the
            ``state_dict=`` of a ``checkpoint_transport``
    """

    def __init__(self, *arguments: Any, in_place: bool = True, **named: Any) -> None:
        given = inspect.signature(super().__init__).bind(*arguments, **named)
        given.apply_defaults()
        if given.arguments["checkpoint_transport"] is None:
            given.arguments["checkpoint_transport"] = HTTPTransport(timeout=given.arguments["timeout"])
        #: Whether the training thread waits for its quorums, so that nothing uses the tensors during a heal.
        self._waits = _validate.boolean("in_place", in_place)
        super().__init__(*given.args, **given.kwargs)
        transport = self._checkpoint_transport
        if isinstance(transport, HTTPTransport):
            self._client: Any = ReplicaSources(self._client, transport, self._group_rank)
            if in_place:
                transport.receive_into(self._live_state)
        else:
            self._waits = False
            logger.warning(
                "replicas heal from the source that torchft assigns alone, and into fresh memory: the "
                "checkpoint_transport is a %s, not a tensorferry.HTTPTransport",
                type(transport).__name__,
            )

    def start_quorum(self, *arguments: Any, **named: Any) -> None:
        """Begins a step, as torchft's method; until this replica has taken part in one, it waits for the quorum."""
        super().start_quorum(*arguments, **named)
        if self._waits:
            self.wait_quorum()
            self._waits = not self._use_async_quorum or self._errored is not None

    def _live_state(self) -> Any:
        """Returns the state that a heal may write to; ``None`` if there is none."""
        return self._manager_state_dict() if self._waits and self._user_state_dicts else None
