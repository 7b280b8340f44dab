"""torchtitan's own trainer on the CPU, by ``tensorferry.torchtitan.train``; the arguments are those of torchtitan."""

from __future__ import annotations

import dataclasses
import sys
import types
from unittest import mock

import torch

# torchtitan trains on accelerators only, and reads data sets that this job does not have.
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30)
torch.cpu.get_device_name = lambda *_: "cpu"
torch.cpu.current_device = lambda: 0
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = torch.cpu.memory_stats = lambda *_: {}
for name in ("datasets", "datasets.distributed", "torch.utils.tensorboard"):
    sys.modules.setdefault(name, mock.MagicMock(__path__=[]))

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from tensorferry.torchtitan.train import main  # noqa: E402


class Ones(BaseDataLoader):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, *_, seq_len, local_batch_size, **__):
        self.tokens = torch.ones(local_batch_size, seq_len, dtype=torch.int64)

    def __iter__(self):
        while True:
            yield {"input": self.tokens}, self.tokens

    def state_dict(self):
        return {}

    load_state_dict = mock.Mock()


def tiny():
    """Returns the configuration of the job; torchtitan calls this."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:1]
    spec.model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        model_spec=spec,
        optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(local_batch_size=2, seq_len=16, disable_cuda_graphs=True),
        dataloader=Ones.Config(),
        tokenizer=types.SimpleNamespace(build=lambda **_: None),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False, keep_latest_k=0),
        activation_checkpoint=None,
    )


if __name__ == "__main__":
    main()
