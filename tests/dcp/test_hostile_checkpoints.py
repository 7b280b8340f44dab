"""Hostile checkpoints: none of their code runs, and the sizes they announce take no memory."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from indexes import written_with
from tensorferry import errors
from tensorferry._native import Index
from tensorferry.dcp import FileReader, FileWriter, index, load_plan, save_plan
from tensorferry.memory.tensors import no_rows
from tensorferry.pickles.allowlist import Allowed
from tensorferry.storage import commits, reserved
from tensorferry.storage.container import Container

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

MUCH = 2 << 30


class Script(torch.nn.Module):
    """Writes a file when it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, given: int):
        return given

    @torch.jit.export
    def __getstate__(self):
        return (self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]):
        self.path = state[0]
        self.training = state[1]
        torch.save(torch.zeros(3), state[0])


def script(path):
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Script(str(path))), file)
    return file.getvalue()


def two_directories(archive, name, other):
    """Returns the archive with a second directory behind the first, in which ``name`` has another name.

    Readers that search backwards from the end find the second; those that follow the end record find the first.
    """
    end = archive.rfind(b"PK\5\6")
    length, start = struct.unpack_from("<II", archive, end + 12)
    return archive[:end] + archive[start : start + length].replace(name, other) + archive[end:]


@pytest.fixture
def ran(tmp_path):
    """Returns the path of a file that exists only if code of an archive has run."""
    return tmp_path / "ran"


def hostile(ran):
    whole = script(ran)
    renamed = two_directories(whole, b"constants.pkl", b"constantz.pkl")
    assert not any("constants.pkl" in name for name in zipfile.ZipFile(io.BytesIO(renamed)).namelist())
    legacy, tar = io.BytesIO(), io.BytesIO()
    torch.save([1], legacy, _use_new_zipfile_serialization=False)
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name in ("pickle", "storages", "tensors"):
            archive.addfile(tarfile.TarInfo(name))
    return {
        "script": whole,
        "two directories": renamed,
        "legacy": legacy.getvalue(),
        "tar": tar.getvalue(),
        "none": b"",
    }


def test_no_form_of_archive_but_torch_saves_own_is_read(ran):
    torch.jit.load(io.BytesIO(script(ran)))
    assert ran.exists()  # without our checks, the attack works
    ran.unlink()
    for name, data in hostile(ran).items():
        damaged = name == "none"
        with pytest.raises(errors.ProtocolError if damaged else errors.UnsafePickle):
            load_plan.unpickled(data, name, Allowed())
        assert not ran.exists(), name


def test_no_code_of_a_checkpoint_runs(ran, tmp_path, monkeypatch):
    archive = hostile(ran)["two directories"]
    monkeypatch.setattr(save_plan.torch, "save", lambda _, file, **__: file.write(archive))
    dcp.save({"o": "an object"}, storage_writer=FileWriter(tmp_path / "folder"))
    monkeypatch.undo()
    assert not ran.exists()
    with pytest.raises(dcp.CheckpointException, match="UnsafePickle"):
        dcp.load({"o": ""}, storage_reader=FileReader(tmp_path / "folder"))
    assert not ran.exists()


def peak():
    """Returns the peak memory of this process since the last call, in MiB."""
    with open("/proc/self/status") as status:
        most = int(status.read().split("VmHWM:")[1].split()[0]) >> 10
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    return most


def test_the_announced_length_of_an_object_takes_no_memory(tmp_path, monkeypatch):
    for nbytes, error in ((MUCH, "ProtocolError"), (1 << 62, "SystemRefused")):
        with monkeypatch.context() as patched:
            written_with(patched, lambda columns, n=nbytes: columns["bytes"].__setitem__(0, n))
            dcp.save({"o": "an object"}, storage_writer=FileWriter(tmp_path))
        peak()
        before = peak()
        with pytest.raises(dcp.CheckpointException, match=error):
            dcp.load({"o": ""}, storage_reader=FileReader(tmp_path))
        assert peak() < before + 256


FAR = 200_000_000
PICKLED = {
    "far out": {"o": ("o", FAR)},
    "far out, inside": {"o": ("o", FAR, "x")},
    "a list as path": {"o": ["o", FAR]},
    "a float": {"o": ("o", 2e8, "x")},
    "a dictionary as path": {"o": {1: FAR, 0: "o", -1: "x"}},
    "a range": {"o": range(FAR)},
    "bytes": {"o": bytes([255]) * 9000},
    "a tensor": {"o": ("o", torch.tensor(FAR))},
    "deep": {"o": ("o",) * 100_000},
}


@pytest.mark.parametrize("name", PICKLED)
def test_pickled_paths_that_lead_far_out_are_refused(name, tmp_path, monkeypatch):
    kept = pickle.dumps(PICKLED[name], 4)
    written_with(monkeypatch, lambda columns: columns.update(planner=[*kept]))
    dcp.save({"o": "an object"}, storage_writer=FileWriter(tmp_path))
    with pytest.raises(dcp.CheckpointException, match=r"invalid path|planner's data"):
        _load_state_dict_from_keys(storage_reader=FileReader(tmp_path))


def encoded(planner=None):
    """Returns an index of one object, with the data of a planner."""
    made = Index()
    made.add("o", None, ())
    made.add_chunk((), (), 0, 1, index.OBJECT)
    if planner is not None:
        made.planner = pickle.dumps(planner, 4)
    return made.encode()


def decoded(data, trust=False):
    return index.decode(data, "here", Allowed(trust=trust), ["f"])


def test_an_index_of_another_version_is_refused_by_its_number():
    data = bytearray(encoded())
    assert decoded(bytes(data)).planner_data is None
    data[8] = 2
    with pytest.raises(errors.ProtocolError, match=r"here: .*version 2.*upgrade the older side"):
        decoded(bytes(data))


def test_a_checkpoint_of_a_version_before_this_index_is_refused_with_what_to_do(tmp_path):
    dcp.save({"o": 1}, storage_writer=FileWriter(tmp_path))
    path = tmp_path / "index.safetensors"
    text, commit = commits.read(path)
    control = [(reserved.OLD_INDEX, text), (reserved.INDEX_FILES, commit.encode())]
    Container(no_rows(), None, True, control).write(path, partial=tmp_path / "p")
    with pytest.raises(errors.ProtocolError, match=r"older tensorferry.*save it anew"):
        FileReader(tmp_path).read_metadata()


@pytest.mark.parametrize(
    "kept", [{"x": FAR}, {"o": {"rank": 3, "shape": (2, 3)}}, {"o": (512, 1024)}, {"o": 0.5}, [1, 2], "text"], ids=str
)
def test_what_planners_of_ones_own_keep_is_read(kept):
    assert decoded(encoded(kept)).planner_data == kept
    # The limits do not apply to a reader that trusts the source.
    assert decoded(encoded({"o": ("o", FAR)}), trust=True).planner_data == {"o": ("o", FAR)}
