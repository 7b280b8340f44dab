"""The functions of this package that pickles on the network refer to.

A receiver, which may run another version, looks them up by module and function name. So the name of this module, the
names of its functions and their parameters must never change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def with_grad(value: Tensor) -> Tensor:
    """Sets ``requires_grad`` on ``value`` and returns it."""
    return value.requires_grad_()


def rebuild_dtensor(local: Tensor, spec: Any, requires_grad: bool) -> Tensor:
    """Returns a DTensor whose local tensor is ``local``; ``spec`` is its ``DTensorSpec``."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=requires_grad)
