"""The bytes of tensors in memory."""

from __future__ import annotations

import torch

from .._native import _checksum


def digest_of(tensor: torch.Tensor) -> str | None:
    """Returns CRC-64/NVME of a tensor's elements, in hexadecimal digits; ``None`` if it has no elements of its own."""
    if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor) not in _PLAIN:
        return None
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return f"{_checksum(whole.data_ptr(), whole.numel() * whole.element_size()):016x}"


_PLAIN = (torch.Tensor, torch.nn.Parameter)
