"""``Manager``, torchft's class with every healthy replica as a source of those that heal."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torchft.manager

from .replica_sources import ReplicaSources
from .transport import HTTPTransport

logger = logging.getLogger("tensorferry")

__all__ = ["Manager"]


class Manager(torchft.manager.Manager):  # type: ignore[misc]  # torchft has no types
    """torchft's ``Manager``; a replica that heals fetches from all healthy replicas at once.

    torchft assigns one healthy replica to each one that heals, and only that one sends. With this class in all
    replicas the others send too: a heal takes ranges from each of them, goes on when one dies, the assigned one
    included, and costs each healthy replica a share of the bytes. A replica that runs torchft's own ``Manager`` in the
    same job heals, and is healed from, as before.

    In a step in which somebody heals, every healthy replica calls the ``state_dict`` functions, as torchft does for
    the assigned one. The replicas must hold the same state: one whose state differs in structure or bytes (a position
    in the data, the state of a random generator) is left out, and what it sent is fetched again. At most eight
    replicas besides the assigned one send to one that heals. They find each other through the store that torchft's
    process groups use; if it does not answer, replicas heal as torchft assigns them, and a warning says so.

    Args:
        arguments: as for torchft's class. A ``checkpoint_transport`` must be a ``tensorferry.HTTPTransport`` for all
            this; by default one is made with the ``timeout`` that is given here.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        given = inspect.signature(super().__init__).bind(*arguments, **named)
        given.apply_defaults()
        if given.arguments["checkpoint_transport"] is None:
            given.arguments["checkpoint_transport"] = HTTPTransport(timeout=given.arguments["timeout"])
        super().__init__(*given.args, **given.kwargs)
        transport = self._checkpoint_transport
        if isinstance(transport, HTTPTransport):
            self._client: Any = ReplicaSources(self._client, transport, self._group_rank)
        else:
            logger.warning(
                "replicas heal from the source that torchft assigns alone: the checkpoint_transport is a %s, not a "
                "tensorferry.HTTPTransport",
                type(transport).__name__,
            )
