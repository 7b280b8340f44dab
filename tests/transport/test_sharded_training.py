"""FSDP2 and torchft's asynchronous quorum, in which another thread sends in the middle of a step.

The thread of the quorum is stood in for by one that sends at a chosen point of the forward and of the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from child import Child

pytestmark = pytest.mark.process


@pytest.mark.beyond_torchft
@pytest.mark.timeout(100)
def test_a_sharded_state_is_sent_and_received_in_the_middle_of_a_step(forked_child: Child) -> None:
    out = forked_child.run("""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

    def build(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        mesh = init_device_mesh("cpu", (1,))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters()), model.state_dict()

    def train(model, optimizer, number):
        optimizer.zero_grad()
        loss = model(torch.full((4, 16), float(number))).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def bits(value):
        return value.full_tensor().numpy().tobytes() if torch.is_tensor(value) else value

    source, target = open_pair()
    model, optimizer, weights = build(1)
    alike, its_optimizer, _ = build(1)
    seen = []

    def quorum():
        before = {name: bits(value) for name, value in weights.items()}
        source.send_checkpoint([1], 1, {"model": weights, "optimizer": optimizer.state_dict()}, LONG)
        got = target.recv_checkpoint(0, source.metadata(), 1, LONG)
        seen.append({name: bits(value) for name, value in got["model"].items()} == before)

    def interrupt(*_):
        thread = threading.Thread(target=quorum)
        thread.start()
        thread.join()

    for number in range(3):
        handles = []
        if number:
            # Within the forward pass, and then the backward pass, of a layer: its parameters are gathered then.
            hook = model[1].register_forward_pre_hook if number == 1 else model[1].register_full_backward_pre_hook
            handles.append(hook(interrupt))
        assert train(model, optimizer, number) == train(alike, its_optimizer, number)
        for handle in handles:
            handle.remove()
        source.disallow_checkpoint()
    assert seen == [True, True]
    print("the same")
    source.shutdown()
    target.shutdown()
    dist.destroy_process_group()
    """)
    assert "the same" in out
