"""Host memory for bytes on their way to or from an accelerator."""

from __future__ import annotations

import logging
import threading

import torch

from .accelerator import Accelerator

logger = logging.getLogger("tensorferry")

#: Held while it is decided who warns.
_warning = threading.Lock()


class HostMemory:
    """Makes host memory.

    Args:
        accelerator: gives page-locked memory, from which it copies at full speed; where there is none, pageable memory,
            and where the system refuses, that. One warning tells so, however much memory is refused to whomever.
            Nothing is asked of it before memory is. ``None``: pageable memory from the beginning.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        """Nothing is made yet."""
        self._accelerator = accelerator

    def make(self, nbytes: int) -> torch.Tensor:
        """Memory of ``nbytes`` bytes, 1-D uint8; what it holds is arbitrary."""
        locked = self._locked(nbytes)
        if locked is not None:
            return locked
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def lend(self, nbytes: int) -> tuple[int, torch.Tensor] | None:
        """Address and owner of page-locked memory of ``nbytes`` bytes; ``None`` where there is none."""
        locked = self._locked(nbytes)
        return None if locked is None else (locked.data_ptr(), locked)

    def _locked(self, nbytes: int) -> torch.Tensor | None:
        # Another thread may be refused meanwhile, and forget it.
        accelerator = self._accelerator
        if accelerator is None:
            return None
        try:
            if not accelerator.is_available():
                self._accelerator = None
                return None
            # Kept memory outlives the mode of who first needs it: torch refuses to write to an inference tensor later.
            with torch.inference_mode(False):
                return accelerator.pinned(nbytes)
        except RuntimeError as e:
            self._accelerator = None
            with _warning:
                told, accelerator.refused = accelerator.refused, True
            if not told:
                logger.warning(
                    "cannot pin %d bytes of host memory for checkpoints (%s): copies to and from the accelerator "
                    "will be slower; raise the limit on locked memory (ulimit -l)",
                    nbytes,
                    e,
                )
            return None
