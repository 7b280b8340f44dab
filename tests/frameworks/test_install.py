"""``tensorferry.install``: what it replaces, in which processes, and that it can be undone."""

from __future__ import annotations

import concurrent.futures
import inspect
import logging
import multiprocessing
import os
import sys
import threading
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils

import tensorferry
from tensorferry.dcp import FileReader, FileWriter, marker
from tensorferry.frameworks import installing

pytestmark = pytest.mark.filterwarnings("ignore")

try:
    import torchft
    import torchft.manager
except ImportError:
    torchft = None


def names(folder):
    return {path.name.partition("-")[0] for path in folder.iterdir()}


OURS = {".metadata", "index.safetensors", "rank00000"}


def test_names_of_torch_make_our_classes_until_it_is_undone(tmp_path, caplog):
    before = {name: vars(dcp)[name] for name in ("FileSystemWriter", "FileSystemReader")}
    with caplog.at_level(logging.INFO, "tensorferry"), tensorferry.install():
        assert "torch.distributed.checkpoint.FileSystemWriter is replaced" in caplog.text
        assert isinstance(dcp.FileSystemWriter(tmp_path, single_file_per_rank=True, thread_count=4), FileWriter)
        assert isinstance(dcp.FileSystemReader(tmp_path), FileReader)
        dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "one", no_dist=True)
        assert names(tmp_path / "one") == OURS
        found = {"a": torch.zeros(3)}
        dcp.load(found, checkpoint_id=tmp_path / "one", no_dist=True)
        assert found["a"].tolist() == [1, 1, 1]
        # The tools of torch that name its reader.
        format_utils.dcp_to_torch_save(tmp_path / "one", tmp_path / "merged.pt")
        assert torch.load(tmp_path / "merged.pt")["a"].tolist() == [1, 1, 1]
    assert {name: vars(dcp)[name] for name in before} == before
    assert _storage_utils.FileSystemReader is filesystem.FileSystemReader
    assert "undone" in caplog.text
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "two", no_dist=True)
    assert not marker.is_marker(tmp_path / "two/.metadata")


def test_derived_classes_stay_torchs_and_objects_of_both_count_as_torchs(tmp_path):
    with tensorferry.install():

        class Mine(dcp.FileSystemReader):
            pass

        assert Mine.__mro__[1] is filesystem.FileSystemReader
        for one in (FileReader(tmp_path), filesystem.FileSystemReader(tmp_path), Mine(tmp_path)):
            assert isinstance(one, dcp.FileSystemReader)
        assert not isinstance(FileReader(tmp_path), dcp.FileSystemWriter)
        # The names are still good for annotations and signatures.
        assert (dcp.FileSystemReader | None) == (filesystem.FileSystemReader | None)
        assert inspect.signature(dcp.FileSystemReader) == inspect.signature(filesystem.FileSystemReader)


def test_what_only_torchs_writer_can_do_is_left_to_it(tmp_path, caplog):
    with tensorferry.install():
        theirs = dcp.FileSystemWriter(tmp_path, serialization_format=filesystem.SerializationFormat.SAFETENSORS)
        assert type(theirs) is filesystem.FileSystemWriter
        assert "no other format" in caplog.text
        with pytest.raises(TypeError):
            dcp.FileSystemWriter(tmp_path, no_such_option=1)


def test_an_installation_that_fails_has_replaced_nothing(monkeypatch):
    before = [dcp.FileSystemWriter, dcp.FileSystemReader]
    with monkeypatch.context() as broken:
        broken.setattr(installing.importlib.util, "find_spec", lambda _: True)
        broken.setattr(installing, "_TRANSPORT", ("torch.no_such_module",))
        with pytest.raises(ImportError, match="no_such_module"):
            tensorferry.install()
    assert [dcp.FileSystemWriter, dcp.FileSystemReader] == before
    assert installing._current == []


def test_installations_may_end_in_any_order():
    before = vars(dcp)["FileSystemReader"]
    first, second, third = tensorferry.install(), tensorferry.install(), tensorferry.install()
    installed = vars(dcp)["FileSystemReader"]
    for one in (first, third, third, first):
        one.undo()
        assert vars(dcp)["FileSystemReader"] is installed
    second.undo()
    assert vars(dcp)["FileSystemReader"] is before
    second.undo()
    with tensorferry.install():
        assert vars(dcp)["FileSystemReader"] is not before
    assert vars(dcp)["FileSystemReader"] is before


def test_threads_that_install_and_undo_leave_torch_as_it_was(tmp_path):
    before = {name: vars(dcp)[name] for name in ("FileSystemWriter", "FileSystemReader")}

    def work():
        for _ in range(50):
            with tensorferry.install():
                assert isinstance(dcp.FileSystemReader(tmp_path), FileReader)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work) for _ in range(8)]:
            done.result(60)
    assert {name: vars(dcp)[name] for name in before} == before


def test_what_somebody_else_has_replaced_meanwhile_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(dcp, "FileSystemReader", filesystem.FileSystemReader)
    with tensorferry.install():
        dcp.FileSystemReader = wrapped = lambda path: path
    assert dcp.FileSystemReader is wrapped
    assert "stays as it is" in caplog.text
    assert _storage_utils.FileSystemReader is filesystem.FileSystemReader


def test_modules_that_keep_torchs_classes_are_named_in_the_log(monkeypatch, caplog):
    before = types.ModuleType("a_framework")
    before.FileSystemWriter = filesystem.FileSystemWriter
    monkeypatch.setitem(sys.modules, "a_framework", before)
    monkeypatch.setitem(sys.modules, "not_there", None)
    if torchft is not None:
        before.HTTPTransport = torchft.manager.HTTPTransport
    with tensorferry.install():
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        names = ["FileSystemWriter", *(["HTTPTransport"] if torchft is not None else [])]
        assert warnings == [
            f"a_framework has imported {name} before tensorferry.install() and keeps it: call install() before that "
            "import"
            for name in names
        ]
        assert before.FileSystemWriter is filesystem.FileSystemWriter


@pytest.mark.process
def test_a_forked_child_has_it_and_undoes_it_for_itself_alone(tmp_path):
    held, go = threading.Event(), threading.Event()

    def hold():
        with installing._lock.held():
            held.set()
            go.wait(60)

    with tensorferry.install() as installed:
        ours = vars(dcp)["FileSystemReader"]
        # Another thread is inside of install or undo at the fork.
        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(60)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert isinstance(dcp.FileSystemReader(tmp_path), FileReader)
                installed.undo()
                assert dcp.FileSystemReader is filesystem.FileSystemReader
                code = 0
            finally:
                os._exit(code)
        go.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert vars(dcp)["FileSystemReader"] is ours


class _Waiting:
    """A part of a state whose save waits, so that something can happen meanwhile."""

    def __init__(self):
        self.asked, self.go = threading.Event(), threading.Event()

    def state_dict(self):
        self.asked.set()
        assert self.go.wait(60)
        return {"a": torch.ones(3)}

    def load_state_dict(self, state):
        """torch asks parts for their state that can load one, too."""


def test_a_save_that_runs_ends_as_it_has_begun(tmp_path):
    def save(folder, meanwhile):
        part = _Waiting()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            saving = pool.submit(dcp.save, {"part": part}, checkpoint_id=folder, no_dist=True)
            assert part.asked.wait(60)
            try:
                return meanwhile()
            finally:
                part.go.set()
                saving.result(60)

    save(tmp_path / "ours", tensorferry.install().undo)
    save(tmp_path / "theirs", tensorferry.install).undo()
    assert names(tmp_path / "ours") == OURS
    assert (tmp_path / "theirs/__0_0.distcp").exists()


def test_arguments_are_checked():
    with pytest.raises(tensorferry.errors.InvalidArgument, match="safe_globals"):
        tensorferry.install(safe_globals=[1])
    with pytest.raises(tensorferry.errors.InvalidArgument, match="files"):
        tensorferry.install(files=1)
    assert dcp.FileSystemReader is filesystem.FileSystemReader


@pytest.mark.skipif(torchft is None, reason="torchft is not installed")
def test_torchfts_manager_builds_our_transport():
    theirs = torchft.manager.HTTPTransport
    with tensorferry.install(files=False):
        assert torchft.manager.HTTPTransport is tensorferry.HTTPTransport
        assert dcp.FileSystemReader is filesystem.FileSystemReader
    assert torchft.manager.HTTPTransport is theirs


def _in_child(folder):
    dcp.save({"a": torch.ones(3)}, checkpoint_id=folder, no_dist=True)


@pytest.mark.nightly
def test_spawned_children_have_it_too(tmp_path):
    context = multiprocessing.get_context("spawn")
    for folder, installed in ((tmp_path / "ours", True), (tmp_path / "theirs", False)):
        child = context.Process(target=_in_child, args=(folder,))
        if installed:
            with tensorferry.install():
                child.start()
        else:
            child.start()
        child.join(100)
        assert child.exitcode == 0
        assert (names(folder) == OURS) is installed
    assert sys.modules["torch.distributed.checkpoint"].FileSystemWriter is filesystem.FileSystemWriter
