"""A transport that delivers one wrong bit, which the example's check must notice."""

from __future__ import annotations

from typing import Any

from torchft.checkpointing import HTTPTransport


class FlippingTransport(HTTPTransport[Any]):
    def recv_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        state = super().recv_checkpoint(*args, **kwargs)
        numbers = state["user"]["default"]["model"]["head.bias"].numpy()
        numbers.view("uint8")[0] ^= 1
        return state
