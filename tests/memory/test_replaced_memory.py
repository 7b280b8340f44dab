"""Tensors get other memory while they are served, or while a receive fills them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tensorferry
from exchange import TIMEOUT, receive, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from child import Child

pytestmark = [pytest.mark.timeout(120), pytest.mark.beyond_torchft]

#: Operations that replace the memory of the Parameter `p`, which belongs to the module `m`.
REPLACEMENTS = {
    "data": "p.data = torch.full((4,), 7.0)",
    "set_": "torch.no_grad()(lambda: p.set_(torch.full((4,), 7.0)))()",
    "half": "m.half()",
    "swapped": "torch.utils.swap_tensors(p, nn.Parameter(torch.full((4,), 7.0)))",
    "exchanged for an average": "ema = p.data; p.data = torch.full(p.shape, 7.0); del ema",
}

SOURCE = """
    from torch import nn
    p = nn.Parameter(torch.full((16 << 20,), 1.5))
    m = nn.Module()
    m.p = p
    source, target = open_pair()
    source.send_checkpoint([1], 1, {{"p": p, "twice": [p]}}, LONG)
    {replace}
    stranger = torch.full((16 << 20,), 9.0)
    gc.collect()
    for mine in (p.detach(), stranger):
        received = target.recv_checkpoint(0, source.metadata(), 1, LONG)["p"]
        assert received.shape == (16 << 20,) and bool((received == 1.5).all()), received
        source.allow_checkpoint(1)
        del mine, stranger
        stranger = None
    source.disallow_checkpoint()
    print("done")
"""

TARGET = """
    from torch import nn
    p = nn.Parameter(torch.zeros(64 << 20))
    m = nn.Module()
    m.p = p
    strangers = []

    def replace():
        {replace}
        strangers.append(torch.full((64 << 20,), 9.0))

    def progress(here, there):
        if here and not strangers:
            replace()

    source = HTTPTransport(LONG, 2, network=tensorferry.Network(max_bandwidth=400 << 20))
    target = HTTPTransport(LONG, 2, state_dict=lambda: {{"p": p}}, progress=progress)
    source.send_checkpoint([1], 1, {{"p": torch.full((64 << 20,), 1.5)}}, LONG)
    try:
        target.recv_checkpoint(0, source.metadata(), 1, LONG)
    except tensorferry.StateMismatch as error:
        assert "p was given other memory" in str(error), error
        print("refused")
    assert bool((strangers[0] == 9.0).all()), "a foreign tensor was written to"
    print("done")
"""


@pytest.mark.process
@pytest.mark.parametrize("how", REPLACEMENTS)
def test_what_was_sent_is_served_whatever_memory_the_tensor_has_now(how: str, forked_child: Child) -> None:
    script = SOURCE.format(replace=REPLACEMENTS[how])
    assert forked_child.run(script) == "done\n"


@pytest.mark.process
@pytest.mark.parametrize("how", REPLACEMENTS)
def test_a_target_that_is_given_other_memory_is_an_error(how: str, forked_child: Child) -> None:
    script = TARGET.format(replace=REPLACEMENTS[how])
    assert forked_child.run(script) == "refused\ndone\n"


def test_a_view_that_is_given_other_memory_is_an_error_too(open_transport: Callable[..., Any]) -> None:
    """This holds for tensors that are written when everything has arrived: views and strided tensors."""
    for make in (lambda b: b[8:], lambda b: b[::2], lambda b: b.view(2, -1).t()):
        view = make(torch.zeros(1 << 20))
        live = {"view": view, "other": torch.zeros(1 << 20)}
        replaced: list[torch.Tensor] = []

        def progress(here: int, there: int, view: torch.Tensor = view, replaced: list[torch.Tensor] = replaced) -> None:
            del here, there
            if not replaced:
                replaced.append(torch.full(view.shape, 7.0))
                view.data = replaced[0]

        source, target = open_transport(), open_transport(state_dict=lambda live=live: live, progress=progress)
        source.send_checkpoint([1], 1, {name: torch.ones(t.shape) for name, t in live.items()}, TIMEOUT)
        with pytest.raises(tensorferry.StateMismatch, match="view was given other memory"):
            receive(target, source, 1)
        assert bool((replaced[0] == 7).all())


def test_replaced_memory_is_released_with_the_publication(open_transport: Callable[..., Any]) -> None:
    import weakref

    source = open_transport()
    array = np.zeros(1 << 20, dtype=np.float32)
    gone = weakref.ref(array)
    state = {"w": torch.from_numpy(array)}
    source.send_checkpoint([1], 1, state, TIMEOUT)
    state["w"].data = torch.zeros(1)
    del array
    assert gone() is not None
    source.disallow_checkpoint()
    until(lambda: gone() is None, "the memory that only the publication held is free")
