"""States that must not crash the process: nested too deep, without memory, or containing themselves.

Every test runs in a process of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from child import Child

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.beyond_torchft]


@pytest.mark.parametrize("levels", [1_000, 20_000])
def test_a_very_deep_tree_is_carried_or_an_error(levels: int, forked_child: Child) -> None:
    out = forked_child.run(f"""
        state = torch.ones(2)
        for _ in range({levels}):
            state = {{"d": state}}
        source, target = open_pair()
        try:
            source.send_checkpoint([1], 1, state, LONG)
            received = target.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=30))
            for _ in range({levels}):
                received = received["d"]
            assert torch.equal(received, torch.ones(2))
        except (tensorferry.TensorferryError, RecursionError) as error:
            print(type(error).__name__, flush=True)
        send_and_receive(source, target, 2)
        print("goes on", flush=True)
    """)
    assert "goes on" in out


@pytest.mark.parametrize(
    "shape", ["tensor", "tensor[3:9]", "torch.nn.Parameter(tensor)", "[tensor, tensor.view(2, -1)]"]
)
def test_freed_storage_is_carried_or_refused_but_never_read(shape: str, forked_child: Child) -> None:
    """FSDP frees the storage under a tensor that keeps its shape: there is no memory to send."""
    out = forked_child.run(f"""
        source, target = open_pair()
        tensor = torch.arange(1024.0)
        state = {{"user": {{"leaf": {shape}}}}}
        tensor.untyped_storage().resize_(0)
        try:
            source.send_checkpoint([1], 1, state, LONG)
            received = target.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=30))
        except tensorferry.UnsupportedLeaf as error:
            assert "user.leaf" in str(error), error
        else:
            for leaf in torch.utils._pytree.tree_leaves(received):
                assert leaf.untyped_storage().nbytes() == 0
                assert leaf.dtype == torch.float32
        send_and_receive(source, target, 2)
        print("goes on", flush=True)
    """)
    assert "goes on" in out


@pytest.mark.parametrize("references", [1, 2])
@pytest.mark.parametrize("kind", ["dict", "list"])
def test_a_container_that_holds_itself_is_carried_or_an_error(kind: str, references: int, forked_child: Child) -> None:
    out = forked_child.run(
        f"""
        source, target = open_pair()
        state, keys = ({{}}, "ab") if {kind!r} == "dict" else ([0, 0], [0, 1])
        for key in keys[:{references}]:
            state[key] = state
        try:
            source.send_checkpoint([1], 1, {{"user": state}}, LONG)
            received = target.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=30))["user"]
            for level in range(1000):
                received = received[keys[level % {references}]]
        except (tensorferry.TensorferryError, RecursionError) as error:
            print(type(error).__name__, flush=True)
        send_and_receive(source, target, 2)
        print("goes on", flush=True)
        """,
        within=30,
    )
    assert "goes on" in out
