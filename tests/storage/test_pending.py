"""Outputs under way: whose they are, and that their names take nothing from anybody."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tensorferry.errors import InvalidArgument, SystemRefused
from tensorferry.storage import pending as home
from tensorferry.storage.names import machine
from tensorferry.storage.pending import pending, rename_new

pytestmark = pytest.mark.beyond_torchft


@pytest.fixture(params=["renames", "has no such rename"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a file system can do."""
    if request.param != "renames":
        monkeypatch.setattr(home, "_rename_new", lambda *_: errno.EINVAL)
    return str(request.param)


def write(path: Path, folder: bool) -> None:
    (path / "content" if folder else path).write_text("new")


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize("folder", [False, True])
class TestPending:
    @pytest.mark.parametrize("name", ["out", "x" * 255, "\udcff"])
    def test_it_gets_its_name_and_leaves_nothing(self, name: str, folder: bool, tmp_path: Path) -> None:
        out = tmp_path / name
        with pending(out, folder=folder) as path:
            write(path, folder)
            assert not out.exists()
            with pytest.raises(InvalidArgument, match="another process is writing"):
                pending(out, folder=folder).__enter__()
        assert os.listdir(tmp_path) == [name]
        assert (out / "content" if folder else out).read_text() == "new"

    def test_what_appears_meanwhile_stays(self, folder: bool, tmp_path: Path) -> None:
        def begin() -> None:
            with pending(tmp_path / "out", folder=folder) as path:
                write(path, folder)
                (tmp_path / "out").mkdir()
                (tmp_path / "out" / "mine").write_text("kept")

        with pytest.raises(InvalidArgument, match="has appeared"):
            begin()
        assert (tmp_path / "out" / "mine").read_text() == "kept"
        assert os.listdir(tmp_path) == ["out"]

    def test_an_error_leaves_nothing(self, folder: bool, tmp_path: Path) -> None:
        def begin() -> None:
            with pending(tmp_path / "out", folder=folder) as path:
                write(path, folder)
                raise KeyError("x")

        with pytest.raises(KeyError):
            begin()
        with pytest.raises(SystemRefused, match="cannot be written"), pending(tmp_path / ("x" * 256), folder=folder):
            pass
        assert os.listdir(tmp_path) == []


@pytest.mark.process
def test_a_killed_process_leaves_what_the_next_one_removes(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tensorferry.storage.pending import pending\n"
        "with pending(Path(sys.argv[1]), folder=True) as path:\n"
        "    (path / 'content').write_text('new'); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], check=False, timeout=60)
    assert done.returncode == -9
    [left] = tmp_path.iterdir()
    assert left.name.startswith(f".out.{machine()}")
    # What others have made, of another machine, and of another output.
    kept = [tmp_path / f".out.{'0' * 8}.partial", tmp_path / f".other.{machine()}.partial"]
    for path in kept:
        path.mkdir()
    with pending(tmp_path / "out", folder=True) as path:
        assert os.listdir(path) == []
    assert set(os.listdir(tmp_path)) == {*(path.name for path in kept), "out"}
    # A link in its place leads nowhere.
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mine").write_text("kept")
    (tmp_path / f".more.{machine()}.partial").symlink_to("home")
    with pytest.raises(SystemRefused), pending(tmp_path / "more", folder=True):
        pass
    assert (tmp_path / "home" / "mine").read_text() == "kept"


@pytest.mark.parametrize("why", ["no locks", "another user"])
def test_what_may_be_another_process_s_is_not_taken_over(why: str, tmp_path: Path, monkeypatch) -> None:
    left = tmp_path / f".out.{machine()}.partial"
    left.mkdir()
    (left / "mine").write_text("kept")
    if why == "no locks":
        monkeypatch.setattr(home.fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    with pytest.raises(InvalidArgument, match="remove it if none is writing"), pending(tmp_path / "out", folder=True):
        pass
    assert (left / "mine").read_text() == "kept"


def test_an_empty_folder_may_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    with pending(Path("."), folder=True) as path:
        write(path, True)
    assert (tmp_path / "out" / "content").read_text() == "new"
    with pytest.raises(InvalidArgument, match="exists already"), pending(tmp_path / "out", folder=True):
        pass


@pytest.mark.usefixtures("disk")
def test_a_rename_takes_no_name_away(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("new")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileExistsError):
        rename_new(tmp_path / "new", tmp_path / "file")
    assert (tmp_path / "new").read_text() == "new"
    assert (tmp_path / "file").read_text() == "kept"
    rename_new(tmp_path / "new", tmp_path / "there")
    assert (tmp_path / "there").read_text() == "new"
    assert not (tmp_path / "new").exists()
