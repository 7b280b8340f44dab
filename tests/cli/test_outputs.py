"""Nothing that belongs to somebody else is removed or replaced by ``convert`` and ``pull``."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from commands import command, incomplete, make_state, until, write_archive, write_checkpoint
from equality import assert_same_state
from nights import mostly_at_night
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.cli import conversion, exits
from tensorferry.storage import download

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.beyond_torchft

FORMATS = ("tensorferry", "safetensors", "torch", "checkpoint", "dcp", "torch-dcp")


def state(value: int = 0) -> dict[str, Any]:
    """12 MiB in four tensors."""
    return {str(i): torch.full((3 << 18,), i + value, dtype=torch.int32) for i in range(4)}


@pytest.mark.process
def test_a_conversion_that_fails_leaves_the_beginnings_of_a_pull(
    run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path
) -> None:
    metadata, output = publish(state(), max_bandwidth=8 << 20), tmp_path / "a"
    with command("pull", metadata, "-o", output, "--quiet") as process:
        until(lambda: any(path.stat().st_size > 12 << 20 for path in incomplete(output)), process)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    [partial] = incomplete(output)
    (tmp_path / "a.partial").write_text("mine")
    write_archive({"x": object}, tmp_path / "bad.pt")
    assert run("convert", tmp_path / "bad.pt", output, "--to", "safetensors").status != 0
    assert partial.exists()
    assert (tmp_path / "a.partial").read_text() == "mine"
    assert run("pull", metadata, "-o", output, "--quiet").status == 0
    assert_same_state(load_file(output), state())
    assert incomplete(output) == []


@pytest.mark.parametrize("appears", ["file", "folder", "link"])
@pytest.mark.parametrize("to", FORMATS)
def test_what_appears_during_a_conversion_stays(
    to: str, appears: str, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive({"w": torch.ones(3)}, tmp_path / "a.pt")
    output = tmp_path / "out"

    def make() -> None:
        if appears == "folder":
            output.mkdir()
            (output / "mine").write_text("kept")
        elif appears == "link":
            output.symlink_to("nowhere")
        else:
            output.write_text("kept")

    written = conversion.Conversion._write

    def write(*arguments: Any) -> Any:
        told = written(*arguments)
        make()
        return told

    monkeypatch.setattr(conversion.Conversion, "_write", write)
    told = run("convert", tmp_path / "a.pt", output, "--to", to)
    assert told.status == exits.USAGE, told
    assert "has appeared while it was being written" in told.err
    kept = {"folder": output / "mine", "file": output}
    assert os.readlink(output) == "nowhere" if appears == "link" else kept[appears].read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "out"]


@pytest.mark.process
def test_a_pull_that_begins_during_a_conversion_into_the_same_name(
    run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive(state(100), tmp_path / "a.pt")
    output, metadata = tmp_path / "out.safetensors", publish(state())
    written = conversion.Conversion._write
    pulled: list[int] = []

    def write(*arguments: Any) -> Any:
        with command("pull", metadata, "-o", output, "--quiet") as process:
            pulled.append(process.wait(timeout=110))
        return written(*arguments)

    monkeypatch.setattr(conversion.Conversion, "_write", write)
    told = run("convert", tmp_path / "a.pt", output, "--to", "tensorferry")
    assert (pulled, told.status) == ([0], exits.USAGE), told
    assert_same_state(load_file(output), state())
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "out.safetensors"]


@pytest.mark.process
def test_a_second_conversion_waits_for_the_first(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive({"w": torch.ones(3)}, tmp_path / "a.pt")
    written = conversion.Conversion._write
    second: list[Any] = []

    def write(*arguments: Any) -> Any:
        with command("convert", tmp_path / "a.pt", tmp_path / "out", "--to", "dcp") as process:
            _, err = process.communicate(timeout=110)
        second.append((process.returncode, err))
        return written(*arguments)

    monkeypatch.setattr(conversion.Conversion, "_write", write)
    assert run("convert", tmp_path / "a.pt", tmp_path / "out", "--to", "dcp").status == 0
    [(status, err)] = second
    assert status == exits.USAGE
    assert "another process is writing" in err


class TestPull:
    @pytest.mark.process
    def test_a_file_of_somebody_else_is_replaced_only_by_force(
        self, run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path
    ) -> None:
        metadata, notes = publish(make_state()), tmp_path / "notes.txt"
        notes.write_text("months of work")
        told = run("pull", metadata, "-o", notes)
        assert told.status == exits.USAGE
        assert "no pull has written it" in told.err
        assert "--force" in told.err
        assert notes.read_text() == "months of work"
        # Checkpoints that were not pulled are somebody's, too.
        write_archive(make_state(), tmp_path / "a.pt")
        assert run("convert", tmp_path / "a.pt", tmp_path / "mine.safetensors").status == 0
        before = (tmp_path / "mine.safetensors").read_bytes()
        assert run("pull", metadata, "-o", tmp_path / "mine.safetensors").status == exits.USAGE
        assert (tmp_path / "mine.safetensors").read_bytes() == before
        assert run("pull", metadata, "-o", notes, "--force").status == 0
        assert_same_state(load_file(notes), make_state())

    @pytest.mark.process
    def test_what_an_earlier_pull_has_written_is_replaced(
        self, run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path
    ) -> None:
        for value in (0, 1):
            assert run("pull", publish(state(value), step=value), "-o", tmp_path / "a").status == 0
            assert_same_state(load_file(tmp_path / "a"), state(value))
        assert os.listdir(tmp_path) == ["a"]

    @pytest.mark.process
    @pytest.mark.parametrize("had", [False, True])
    def test_a_file_that_appears_or_changes_meanwhile_stays(
        self, had: bool, run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path, monkeypatch: Any
    ) -> None:
        metadata, output = publish(state()), tmp_path / "a"
        if had:
            assert run("pull", metadata, "-o", output).status == 0
        fetch = download.Download.fetch

        def fetched(self: Any) -> Any:
            report = fetch(self)
            output.write_text("kept")
            return report

        monkeypatch.setattr(download.Download, "fetch", fetched)
        told = run("pull", metadata, "-o", output)
        assert told.status == exits.USAGE
        assert "has appeared or changed" in told.err
        assert output.read_text() == "kept"
        monkeypatch.undo()
        output.rename(tmp_path / "mine")
        assert run("pull", metadata, "-o", output, "--json").json["fetched"] <= 1 << 20
        assert_same_state(load_file(output), state())

    @pytest.mark.process
    def test_a_checkpoint_of_somebody_else_is_replaced_only_by_force(
        self, run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path
    ) -> None:
        write_checkpoint(make_state(), tmp_path / "c")
        before = sorted(os.listdir(tmp_path / "c"))
        told = run("pull", publish(state()), "--into-folder", tmp_path / "c")
        assert told.status == exits.USAGE
        assert "no pull has written it" in told.err
        assert sorted(os.listdir(tmp_path / "c")) == before
        assert run("pull", publish(state()), "--into-folder", tmp_path / "c", "--force").status == 0
        assert_same_state(SyncCheckpointer().load(tmp_path / "c"), state())

    @pytest.mark.process
    def test_what_other_steps_have_left_goes_once_the_file_is_there(
        self, run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path
    ) -> None:
        output = tmp_path / "a"
        with command("pull", publish(state(), step=4, max_bandwidth=8 << 20), "-o", output, "--quiet") as process:
            until(lambda: any(path.stat().st_size > 12 << 20 for path in incomplete(output)), process)
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)
        (tmp_path / ".a.pull-0123456789abcdef.partial").write_text("kept")
        assert len(incomplete(output)) == 2
        assert run("pull", publish(state(), step=5), "-o", output).status == 0
        assert [path.read_text() for path in incomplete(output)] == ["kept"]

    @pytest.mark.process
    @pytest.mark.parametrize("same_host", mostly_at_night([True, False]))
    def test_a_stranger_who_shortens_the_file_ends_the_pull_with_an_error(
        self, same_host: bool, publish: Callable[..., str], tmp_path: Path
    ) -> None:
        output = tmp_path / "a"
        metadata = publish(state(), max_bandwidth=4 << 20, same_host=same_host)
        with command("pull", metadata, "-o", output, "--quiet") as process:
            until(lambda: any(path.stat().st_size > 12 << 20 for path in tmp_path.glob("*a.*partial")), process)
            [partial] = tmp_path.glob("*a.*partial")
            os.truncate(partial, 4096)
            _, err = process.communicate(timeout=110)
        assert process.returncode == exits.UNAVAILABLE, err
        assert "was shortened by another process" in err
        assert not output.exists()

    @pytest.mark.process
    def test_a_file_that_is_shortened_before_it_is_mapped(
        self, run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path, monkeypatch: Any
    ) -> None:
        write = download.Download._write

        def shortened(self: Any, header: bytes) -> None:
            write(self, header)
            os.truncate(self.partial, 4096)

        monkeypatch.setattr(download.Download, "_write", shortened)
        told = run("pull", publish(state()), "-o", tmp_path / "a")
        assert told.status == exits.UNAVAILABLE
        assert "was shortened by another process" in told.err

    @pytest.mark.process
    def test_a_file_that_is_shortened_between_the_fetch_and_its_checksums(
        self, run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path, monkeypatch: Any
    ) -> None:
        seal = download._seal_file

        def shortened(path: Any) -> int:
            os.truncate(path, 4096)
            return seal(path)

        monkeypatch.setattr(download, "_seal_file", shortened)
        told = run("pull", publish(state()), "-o", tmp_path / "a")
        assert told.status == exits.UNAVAILABLE
        assert "was changed by another process" in told.err

    @pytest.mark.process
    def test_two_pulls_of_different_states_into_one_name(
        self, run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path, monkeypatch: Any
    ) -> None:
        one, other, output = publish(state(), step=1), publish(state(7), step=2), tmp_path / "a"
        fetch = download.Download.fetch
        first = threading.Lock()

        def fetched(self: Any) -> Any:
            report = fetch(self)
            if first.acquire(blocking=False):
                with command("pull", other, "-o", output, "--quiet") as process:
                    assert process.wait(timeout=110) == 0
            return report

        monkeypatch.setattr(download.Download, "fetch", fetched)
        assert run("pull", one, "-o", output).status == exits.USAGE
        assert_same_state(load_file(output), state(7))
