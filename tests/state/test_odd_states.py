"""States that must not crash the process: nested too deep, without memory, or containing themselves.

Every test runs in a process of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from child import Child

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.beyond_torchft]

#: Sends a state, and reads what comes back ``levels`` deep, or gets an error; then another state is sent and received.
SEND = """
source, target = open_pair()
try:
    source.send_checkpoint([1], 1, {"user": {"leaf": state}}, LONG)
    received = target.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=30))["user"]["leaf"]
    for level in range(levels):
        received = received[keys[level % len(keys)]]
except tensorferry.errors.UnsupportedLeaf as error:
    assert "user.leaf" in str(error), error
except (tensorferry.TensorferryError, RecursionError) as error:
    print(type(error).__name__, flush=True)
else:
    for leaf in torch.utils._pytree.tree_leaves(received) if freed else ():
        assert leaf.untyped_storage().nbytes() == 0
send_and_receive(source, target, 2)
print("goes on", flush=True)
"""
DEEP = """
state, levels, keys, freed = torch.ones(2), {0}, "d", False
for _ in range(levels):
    state = {{"d": state}}
"""
#: FSDP frees the storage under a tensor that keeps its shape: there is no memory to send.
FREED = """
tensor = torch.arange(1024.0)
state, levels, keys, freed = {0}, 0, "", True
tensor.untyped_storage().resize_(0)
"""
ITSELF = """
state, levels, freed, (keys, count) = {0}, 1000, False, {1}
keys = keys[:count]
for key in keys:
    state[key] = state
"""
STATES = {
    "1,000 levels": DEEP.format(1000),
    "20,000 levels": DEEP.format(20_000),
    "a freed tensor": FREED.format("tensor"),
    "a freed view": FREED.format("tensor[3:9]"),
    **{f"a dict that holds itself {n}": ITSELF.format("{}", ("ab", n)) for n in (1, 2)},
    **{f"a list that holds itself {n}": ITSELF.format("[0, 0]", ([0, 1], n)) for n in (1, 2)},
}


@pytest.mark.parametrize("name", STATES)
def test_an_odd_state_is_carried_or_an_error(name: str, forked_child: Child) -> None:
    assert "goes on" in forked_child.run(STATES[name] + SEND, within=60)
