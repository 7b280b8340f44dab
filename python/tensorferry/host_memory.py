"""Host memory for bytes on their way to or from an accelerator."""

from __future__ import annotations

import logging

import torch

from .accelerator import Accelerator

logger = logging.getLogger("tensorferry")


class HostMemory:
    """Makes host memory.

    Args:
        accelerator: gives page-locked memory, from which it copies at full speed; where the system refuses, one warning
            and pageable memory. ``None``: pageable memory from the beginning.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        """Nothing is made yet."""
        self._accelerator = accelerator

    @classmethod
    def beside(cls, accelerator: Accelerator) -> HostMemory:
        """Page-locked if there is an accelerator at all."""
        return cls(accelerator if accelerator.is_available() else None)

    def make(self, nbytes: int) -> torch.Tensor:
        """Memory of ``nbytes`` bytes, 1-D uint8; what it holds is arbitrary."""
        locked = self._locked(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu") if locked is None else locked

    def lend(self, nbytes: int) -> tuple[int, torch.Tensor] | None:
        """Address and owner of page-locked memory of ``nbytes`` bytes; ``None`` where there is none."""
        locked = self._locked(nbytes)
        return None if locked is None else (locked.data_ptr(), locked)

    def _locked(self, nbytes: int) -> torch.Tensor | None:
        if self._accelerator is None:
            return None
        try:
            return self._accelerator.pinned(nbytes)
        except RuntimeError as e:
            self._accelerator = None
            logger.warning(
                "cannot pin %d bytes of host memory for checkpoints (%s): copies to and from the accelerator "
                "will be slower; raise the limit on locked memory (ulimit -l)",
                nbytes,
                e,
            )
            return None
