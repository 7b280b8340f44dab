"""Objects of a checkpoint as torch's planners take them: as bytes of ``torch.save``."""

from __future__ import annotations

import io
from typing import Any

import torch

from ..errors import ProtocolError
from ..pickles.allowlist import Allowed
from ..pickles.torch_archives import unpickled


def rewritten(data: bytes, fqn: str, allowed: Allowed) -> bytes:
    """Loads a received object and returns it as ``torch.save`` of this process writes it.

    torch's planners unpickle objects without any limits, so they must not get bytes that a peer or a file brought.
    With ``trust_pickle=True`` the data is returned unchanged.

    Raises:
        UnsafePickle, ProtocolError: as for :func:`torch_archives.unpickled`
        SystemRefused: the object announces more than this machine has memory for
        FetchTimeout: the deadline of ``allowed``, if it has one, has passed
    """
    if allowed.trusts:
        return data
    return saved(unpickled(data, fqn, allowed), fqn)


def saved(value: Any, fqn: str) -> bytes:
    """Returns ``value`` as ``torch.save`` of this process writes it, for a planner.

    Raises:
        ProtocolError: torch cannot save it; the message begins with ``fqn``
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception as e:
        raise ProtocolError(f"{fqn} cannot be handed to the planner ({type(e).__name__}: {e})") from e
    return file.getvalue()
