"""torchtitan's real checkpoint manager, with the override that is named on its command line."""

from __future__ import annotations

import dataclasses
import enum

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from framework_ranks import job

from stores import BUCKET, environment, moto, objects
from tensorferry.dcp import marker
from tensorferry.frameworks import installing

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("alone"),
]

try:
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.config import Configurable
    from torchtitan.config.override import OverrideConfig, apply_overrides
except ImportError as e:
    pytest.skip(f"torchtitan 0.3.0 is not installed ({e})", allow_module_level=True)


@dataclasses.dataclass(kw_only=True, slots=True)
class Root(Configurable.Config):
    """What torchtitan's configuration is to an override: a tree with a checkpoint manager in it."""

    checkpoint: CheckpointManager.Config


class Part:
    """A part of the state that is none of torch's."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "bytes": b"x" * self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def manager(folder, value, override=True, files=(), **options):
    root = Root(checkpoint=CheckpointManager.Config(enable=True, interval=1, folder=str(folder), **options))
    if override:
        lines = apply_overrides(
            OverrideConfig(imports=[("tensorferry.torchtitan.files", {"threads": 1, **dict(files)})]), root
        )
        assert any("tensorferry" in line for line in lines)
    model = torch.nn.Linear(8, 8)
    torch.nn.init.constant_(model.weight, float(value))
    return root.checkpoint.build(
        dataloader=Part(value),
        model_parts=[model],
        optimizers=Part(value),
        lr_schedulers=Part(value),
        states={"train_state": Part(value)},
        sd_adapter=None,
    )


def value_of(one):
    assert one.states["train_state"].value == one.states["optimizer"].value
    (weight,) = one.states["model"].model[0].weight.unique().tolist()
    assert weight == one.states["train_state"].value
    return weight


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_job_that_ended_goes_on_from_its_last_step(mode, tmp_path):
    one = manager(tmp_path / "ck", 3, async_mode=mode)
    assert not one.load(), "a fresh start"
    for step in (1, 2):
        one.save(step)
        one.maybe_wait_for_saving()
    one.close()
    assert marker.is_marker(tmp_path / "ck/step-2/.metadata")
    two = manager(tmp_path / "ck", 0)
    assert two.load()
    assert value_of(two) == 3
    # The older step, when a save of the last one was killed before its index.
    (tmp_path / "ck/step-2/.metadata").unlink()
    (tmp_path / "ck/step-2/index.safetensors").unlink()
    three = manager(tmp_path / "ck", 0)
    assert three._find_load_step() == 1
    assert three.load()


def test_a_place_in_a_store_is_saved_and_loaded_with_our_files(monkeypatch):
    with moto() as url:
        for name, value in environment(url).items():
            monkeypatch.setenv(name, value)
        place = f"s3://{BUCKET}/titan"
        manager(place, 6, keep_latest_k=0).save(1)
        assert any("index.safetensors" in key for key in objects(url, "titan/step-1"))
        two = manager(place, 0, keep_latest_k=0)
        two.dcp_load(two._states_to_load(model_only=False), f"{place}/step-1", from_hf=False, from_quantized=False)
        assert value_of(two) == 6


class Colour(enum.IntEnum):
    RED = 1


def test_a_class_that_the_command_line_names_is_loaded(tmp_path):
    manager(tmp_path / "ck", Colour.RED).save(1)
    with pytest.raises(dcp.CheckpointException, match="not on the allow-list"):
        manager(tmp_path / "ck", 0).load()
    named = {"safe_globals": [f"{Colour.__module__}.Colour"]}
    two = manager(tmp_path / "ck", 0, files=named)
    assert two.load()
    assert two.states["train_state"].value is Colour.RED
    with pytest.raises(ImportError, match="no_such"):
        manager(tmp_path / "ck", 0, files={"safe_globals": ["no_such.Thing"]})


def test_steps_that_torch_has_saved_load_with_the_override(tmp_path):
    one = manager(tmp_path / "ck", 5, override=False)
    one.save(1)
    assert (tmp_path / "ck/step-1/__0_0.distcp").exists()
    two = manager(tmp_path / "ck", 0)
    assert two.load()
    assert value_of(two) == 5


def test_without_the_override_a_step_of_ours_is_an_error_and_not_a_fresh_start(tmp_path):
    manager(tmp_path / "ck", 5).save(1)
    with pytest.raises(dcp.CheckpointException, match=r"load it with tensorferry\.dcp\.FileReader"):
        manager(tmp_path / "ck", 0, override=False).load()


def test_the_other_override_installs_for_managers_that_are_derived(tmp_path):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Derived(CheckpointManager.Config):
        pass

    root = Root(checkpoint=Derived(enable=True, interval=1, folder=str(tmp_path)))
    try:
        apply_overrides(OverrideConfig(imports=[("tensorferry.torchtitan.installed", {"transport": False})]), root)
        assert type(root.checkpoint) is Derived
        manager(tmp_path / "ck", 4, override=False).save(1)
        assert marker.is_marker(tmp_path / "ck/step-1/.metadata")
        two = manager(tmp_path / "ck", 0, override=False)
        assert two.load()
        assert value_of(two) == 4
    finally:
        for one in list(installing._current):
            one.undo()


def test_its_own_trainer_goes_on_from_what_it_has_saved(tmp_path):
    for name in ("torchdata", "tokenizers", "spmd_types"):
        pytest.importorskip(name)
    for steps in (3, 5):
        run = ("--module", "titan_job", "--config", "tiny", "--dump_folder", tmp_path, "--training.steps", steps)
        with job("titan_job.py", *run, world=1) as (rank,):
            rank.end(150)
        assert marker.is_marker(tmp_path / f"checkpoint/step-{steps}/.metadata")
    assert any("Training starts at step 4" in line for line in rank.output)
