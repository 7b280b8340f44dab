"""A rank of a job of torchtitan's own trainer, on the CPU; the arguments are those of torchtitan's command line.

    titan_job.py --module titan_job --config tiny ...

It runs ``torchtitan.train.main``. torchtitan trains on accelerators only, so what it asks of one is answered here for
the CPU; and the packages that read its data sets and draw its metrics, which this job does not use, are stood in for.
Prints ``step``, its number and a digest of the state after each step, and ``loaded`` with what a checkpoint gave.
``PAUSE_AT``, in the environment, is a step after which the rank trains no more and waits to be killed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import types
from unittest import mock

import torch

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda *_: "CPU"
torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.cpu.current_device = lambda: 0
torch.cpu.memory_stats = lambda *_: {}
for name in ("datasets", "datasets.distributed", "torch.utils.tensorboard"):
    sys.modules.setdefault(name, mock.MagicMock(__path__=[]))

from framework_ranks import digest  # noqa: E402
from torch.distributed.checkpoint.stateful import Stateful  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan import train  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CommConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class Numbers(BaseDataLoader, Stateful):
    """Batches that depend on the rank and on how many there were; that number is its state."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
        self.rank, self.shape, self.given = dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self):
        while True:
            self.given += 1
            generator = torch.Generator().manual_seed(1000 * self.given + self.rank)
            tokens = torch.randint(2048, self.shape, generator=generator)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {f"given_{self.rank}": self.given}

    def load_state_dict(self, state):
        self.given = state[f"given_{self.rank}"]


class NoTokenizer(BaseTokenizer):
    """torchtitan asks for one; the batches are tokens already."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_):
        raise NotImplementedError

    decode = get_vocab_size = encode


def llama():
    """Returns torchtitan's debug model with two of its layers, and the attention that runs on the CPU."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def tiny():
    """Returns the configuration of a job; torchtitan calls this."""
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        model_spec=llama(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2, seq_len=16, steps=10**6, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
        dataloader=Numbers.Config(),
        tokenizer=NoTokenizer.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=1, last_save_model_only=False, keep_latest_k=0),
        activation_checkpoint=None,
        comm=CommConfig(trace_buf_size=0),
    )


def state_of(trainer):
    """Returns a digest of all that a checkpoint of ``trainer`` holds."""
    return digest({key: one.state_dict() for key, one in sorted(trainer.checkpointer.states.items())})


def report(trainer_class):
    """Has trainers of a class print what they hold after a load and after each step."""
    step, load = trainer_class.train_step, CheckpointManager.load

    def stepping(self, *arguments):
        step(self, *arguments)
        print(f"\nstep {self.step} {state_of(self)}", flush=True)

    def loading(self, *arguments, **named):
        found = load(self, *arguments, **named)
        trainer = self.states["train_state"]
        print(f"\nloaded {found} {trainer.step} {state_of(trainer)}", flush=True)
        return found

    trainer_class.train_step, CheckpointManager.load = stepping, loading


def only_sums():
    """Has FSDP ask for sums of gradients alone: Gloo does not multiply them first."""
    divide = FSDPModule.set_gradient_divide_factor

    def dividing(self, factor):
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = dividing


def pause(at):
    """Has the checkpoint manager wait for ever after a step, when that is saved."""
    save = CheckpointManager.save

    def saving(self, step, *arguments, **named):
        saved = save(self, step, *arguments, **named)
        if step == at:
            self.maybe_wait_for_staging()
            self.maybe_wait_for_saving()
            print(f"\npaused {step}", flush=True)
            time.sleep(10**6)
        return saved

    CheckpointManager.save = saving


if __name__ == "__main__":
    torch.set_num_threads(1)
    only_sums()
    report(Trainer)
    if os.environ.get("PAUSE_AT"):
        pause(int(os.environ["PAUSE_AT"]))
    train.main()
