"""The state, the secret and the sending that the tests of a shared secret and of TLS have in common."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

TIMEOUT = timedelta(seconds=30)
SECRET = "a secret of this job alone"


def state(seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"w": torch.randn(700_000), "half": torch.randn(5).half(), "object": [torch.Size([1]), {"lr": 0.1}]}


def send(source: Any, value: Any = None, step: int = 3) -> str:
    """Publishes `value`, or `state()`, at `source`, and returns its metadata."""
    source.send_checkpoint([1], step, state() if value is None else value, TIMEOUT)
    return source.metadata()
