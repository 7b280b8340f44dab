"""The functions of this package that a pickle on the network names.

A receiver finds them by the name of this module and their own, and it may run another version: neither name, and no
parameter, may change. :data:`FORMER` has the names that earlier versions wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def with_grad(value: Tensor) -> Tensor:
    """``value``, requiring a gradient."""
    return value.requires_grad_()


def rebuild_dtensor(local: Tensor, spec: Any, requires_grad: bool) -> Tensor:
    """A DTensor over ``local``."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=requires_grad)


#: Module and name as earlier versions wrote them, and what they are called now.
FORMER: dict[tuple[str, str], tuple[str, str]] = {
    ("tensorferry.tensors", function.__name__): (__name__, function.__name__)
    for function in (with_grad, rebuild_dtensor)
}
