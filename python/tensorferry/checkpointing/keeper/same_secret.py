"""Whether a trainer has its keeper's shared secret, which it needs when it loads from a buddy, and at no time before.

The keeper sends a text that depends on its secret and shows nothing of it, and the trainer compares it with its own.
They talk on the same machine, as the same user.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any

from ..._native import Secret
from ..._settings import SECRET, SECRET_FILE

_NONCE = 16
_LOST = "what its keeper's buddies hold cannot be loaded when this node is lost"
_NEEDED = f"{_LOST}. Give the trainers the keeper's secret, with {SECRET} or {SECRET_FILE}, or secret= of Keeper"


def described(secret: Secret | None, buddies: int) -> dict[str, Any]:
    """Returns the fields of a message by which a trainer sees whether it has the ``secret`` of a keeper.

    Args:
        secret: the keeper's
        buddies: how many the keeper has
    """
    if secret is None:
        return {"buddies": buddies, "secret": None}
    nonce = secrets.token_bytes(_NONCE)
    return {"buddies": buddies, "secret": [nonce.hex(), secret.comparison(nonce)]}


def difference(secret: Secret | None, fields: dict[str, Any]) -> str | None:
    """Returns what is wrong, and what to do, if a trainer's ``secret`` is not that of the keeper that sent ``fields``.

    Without buddies nothing is fetched, so that nothing is wrong; fields that no keeper sends say nothing.
    """
    buddies, there = fields.get("buddies"), fields.get("secret")
    if type(buddies) is not int or buddies < 1:
        return None
    if there is None:
        if secret is None:
            return None
        return (
            f"this trainer has a shared secret and its keeper has none: {_LOST}. Start the keepers with that "
            f"secret, in {SECRET} or {SECRET_FILE}, or the trainers without"
        )
    if secret is None:
        return f"this trainer has no shared secret and its keeper has one: {_NEEDED}"
    try:
        nonce, expected = bytes.fromhex(there[0]), str(there[1])
        matches = hmac.compare_digest(secret.comparison(nonce).encode(), expected.encode())
    except (TypeError, ValueError, LookupError):
        return None
    return None if matches else f"this trainer has another shared secret than its keeper: {_NEEDED}"
