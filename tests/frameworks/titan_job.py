"""A rank of a job of torchtitan's own trainer, on the CPU; the arguments are those of torchtitan's command line.

    titan_job.py --module titan_job --config tiny ...

It runs ``torchtitan.train.main``. torchtitan trains on accelerators only, so what it asks of one is answered here for
the CPU; the packages that read its data sets and draw its metrics, which these jobs do not use, are stood in for.
Prints ``step``, its number and a digest of the state after each step, and ``loaded`` with what a checkpoint gave; with
the configuration ``healing``, for torchft, ``synced`` and a digest of the model. In the environment:

- ``PAUSE_AT``: the step after which the rank waits to be killed; it prints ``paused``
- ``SAVE_THEIRS``: the step that is also saved with torch's writer, in the folder ``theirs``
- ``COMPARE``: that folder; it is loaded first, with torch's reader, and printed as ``theirs``
- ``PUBLISH``: the state is published when the rank pauses; it prints ``address``
- ``INSTALL``: ``tensorferry.torchtitan.train`` is run instead, for trainers that apply no overrides
"""

from __future__ import annotations

import dataclasses
import logging
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

import torch.distributed.checkpoint as dcp  # noqa: E402
from digests import digest  # noqa: E402
from torch.distributed.checkpoint.staging import StagingOptions  # noqa: E402
from torch.distributed.checkpoint.stateful import Stateful  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan import train  # noqa: E402
from torchtitan.components.checkpointer import AsyncMode, CheckpointManager  # noqa: E402
from torchtitan.components.checkpointer import dcp as checkpointer_dcp  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CommConfig, TrainingConfig  # noqa: E402
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager  # noqa: E402
from torchtitan.experiments.torchft.config.job_config import FaultTolerance  # noqa: E402
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer  # noqa: E402
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from tensorferry.dcp import PeerWriter  # noqa: E402
from tensorferry.torchtitan import train as installing_train  # noqa: E402

#: After as many steps, DiLoCo makes the replicas equal.
SYNC_STEPS = 2


class Numbers(BaseDataLoader, Stateful):
    """Batches that depend on the rank and on how many there were; that number is its state."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
        del config
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
        del config
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


def healing():
    """Returns the configuration of a job that torchft heals; torchtitan calls this."""
    made = tiny()
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    fields["optimizer"] = TorchFTOptimizersContainer.Config(param_groups=made.optimizer.param_groups)
    fields["checkpoint"] = TorchFTCheckpointManager.Config(
        enable=True, interval=10**6, keep_latest_k=0, enable_ft_dataloader_checkpoints=False
    )
    healed = FaultTolerance(enable=True, group_size=2, semi_sync_method="diloco", sync_steps=SYNC_STEPS)
    return FaultTolerantTrainer.Config(**fields, fault_tolerance=healed)


def state_of(manager):
    """Returns a digest of all that a checkpoint manager saves."""
    return digest({key: one.state_dict() for key, one in sorted(manager.states.items())})


class Reporting:
    """What is printed and waited for around the methods of torchtitan's classes."""

    def __init__(self, environment):
        self.pause_at = int(environment.get("PAUSE_AT", 0))
        self.save_theirs = int(environment.get("SAVE_THEIRS", 0))
        self.compare, self.publish = environment.get("COMPARE"), environment.get("PUBLISH")

    def begin(self):
        self.train_step, self.load, self.save = Trainer.train_step, CheckpointManager.load, CheckpointManager.save
        for trainer in (Trainer, FaultTolerantTrainer):
            trainer.train_step = self.reporting(trainer.train_step)
        CheckpointManager.load = lambda *given, **named: self.loading(*given, **named)
        CheckpointManager.save = lambda *given, **named: self.saving(*given, **named)

    @staticmethod
    def reporting(train_step):
        def stepping(trainer, *arguments):
            train_step(trainer, *arguments)
            if isinstance(trainer, FaultTolerantTrainer):
                # Each replica has an inner optimizer and data of its own.
                if trainer.step % SYNC_STEPS == 0:
                    print(f"\nsynced {trainer.step} {digest(trainer.model_parts[0].state_dict())}", flush=True)
                return
            print(f"\nstep {trainer.step} {state_of(trainer.checkpointer)}", flush=True)

        return stepping

    def loading(self, manager, *arguments, **named):
        if self.compare:
            CheckpointManager.dcp_load(manager, manager._states_to_load(False), self.compare, False, False)
            print(f"\ntheirs {state_of(manager)}", flush=True)
            with torch.no_grad():
                for parameter in manager.states["model"].model[0].parameters():
                    parameter.fill_(0.5)
        found = self.load(manager, *arguments, **named)
        print(f"\nloaded {found} {manager.states['train_state'].step} {state_of(manager)}", flush=True)
        return found

    def saving(self, manager, step, *arguments, **named):
        saved = self.save(manager, step, *arguments, **named)
        if step == self.save_theirs:
            theirs = manager._create_checkpoint_id(step, os.path.join(os.path.dirname(manager.folder), "theirs"))
            CheckpointManager.dcp_save(manager, manager._flattened_model_states_sd(), theirs, AsyncMode.DISABLED)
        if step == self.pause_at:
            manager.maybe_wait_for_staging()
            manager.maybe_wait_for_saving()
            if self.publish:
                writer = PeerWriter(interface="127.0.0.1")
                dcp.save(manager._flattened_model_states_sd(), storage_writer=writer)
                print(f"\naddress {writer.folder()}", flush=True)
            print(f"\npaused {step}", flush=True)
            time.sleep(10**6)
        return saved


def only_sums():
    """Has FSDP ask for sums of gradients alone: Gloo does not multiply them first."""
    divide = FSDPModule.set_gradient_divide_factor

    def dividing(self, factor):
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = dividing


def stage_without_accelerator():
    """Has the stager of ``async_with_pinned_mem`` do without pinned memory and streams."""
    options = StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False)
    checkpointer_dcp.StagingOptions = lambda **_: options


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("tensorferry").setLevel(logging.INFO)
    only_sums()
    stage_without_accelerator()
    Reporting(os.environ).begin()
    (installing_train if os.environ.get("INSTALL") else train).main()
