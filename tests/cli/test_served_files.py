"""Files that change while ``tensorferry serve`` serves them: what is pulled is what they were, or nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from commands import TIMEOUT, command, incomplete, until, write_archive
from equality import assert_same_state
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.cli import exits, mapped
from tensorferry.cli.flags import Serving, Trust
from tensorferry.cli.mapped import ServedFiles
from tensorferry.cli.places import find
from tensorferry.cli.serve import Publisher, publishers
from tensorferry.errors import SourceChanged
from tensorferry.net.serve import start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.beyond_torchft

MIB = 1 << 20


def large(value: int = 0) -> dict[str, Any]:
    """A state of 12 MiB, with tensors that are sent from their place and others that are gathered."""
    return {
        **{str(i): torch.full((3 << 18,), i + value, dtype=torch.int32) for i in range(4)},
        **{f"small{i}": torch.full((300,), i + value, dtype=torch.int32) for i in range(20)},
    }


def written(state: Any, path: Path) -> Path:
    """A file of this package, with checksums."""
    saving = SyncCheckpointer()
    saving.save(path.with_name(f"{path.name}.folder"), state)
    saving.close()
    (file,) = path.with_name(f"{path.name}.folder").glob("*rank*.safetensors")
    file.rename(path)
    return path


def replaced(path: Path) -> None:
    written(large(100), path.with_name("other")).replace(path)


def removed(path: Path) -> None:
    path.unlink()


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5 * MIB)
        file.write(b"changed")


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(MIB))


def truncated(path: Path) -> None:
    os.truncate(path, MIB)


def emptied_and_filled(path: Path) -> None:
    """As ``cp`` replaces a file: with the same name, the same length and other bytes."""
    other = written(large(100), path.with_name("other")).read_bytes()
    path.write_bytes(other)


#: How a file changes, and whether its content, which the server holds, does.
CHANGES = {
    "replaced": (replaced, False),
    "removed": (removed, False),
    "overwritten": (overwritten, True),
    "appended": (appended, True),
    "truncated": (truncated, True),
    "emptied and filled": (emptied_and_filled, True),
}


@pytest.fixture
def published() -> Iterator[Callable[[Path], str]]:
    """Publishes a file as ``serve`` does, without its look at the file now and then; returns the metadata."""
    servers = []

    def publish(path: Path) -> str:
        server, host = start(5.0, Serving(interface="127.0.0.1").options(Trust()))
        servers.append((server, publisher := Publisher(server, host, 5, False)))
        (metadata,) = publishers()[find(str(path)).kind](publisher, path)["metadata"]
        return metadata

    yield publish
    for server, _ in servers:
        server.shutdown(1.0)


@pytest.mark.parametrize(
    ("change", "form", "route"),
    [
        *((change, "container", "--no-same-host") for change in CHANGES),
        *((change, "container", "--same-host") for change in ("removed", "truncated")),
        *((change, "archive", "--no-same-host") for change in ("replaced", "truncated")),
    ],
)
def test_a_pull_gets_what_was_published_or_an_error(
    change: str, form: str, route: str, published: Any, run: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "served"
    if form == "archive":
        write_archive(large(), path)
    else:
        written(large(), path)
    metadata = published(path)
    apply, changes = CHANGES[change]
    apply(path)
    told = run("pull", metadata, "-o", tmp_path / "after", route, "--timeout", "5")
    if changes:
        assert told.status == exits.STATUS[SourceChanged], told.err
        assert len(told.err.splitlines()) == 1
        assert not (tmp_path / "after").exists()
    else:
        assert told.status == 0, told.err
        assert_same_state(load_file(tmp_path / "after"), large())


@pytest.mark.parametrize("change", ["removed", "truncated"])
def test_a_change_in_the_middle_of_a_pull(change: str, tmp_path: Path) -> None:
    path, output = written(large(), tmp_path / "served"), tmp_path / "a"
    limits = ["--interface", "127.0.0.1", "--max-bandwidth", "12M"]
    apply, changes = CHANGES[change]
    with command("serve", path, *limits) as server:
        assert server.stdout is not None
        metadata = server.stdout.readline().strip()
        with command("pull", metadata, "-o", output, "--no-same-host", "--timeout", "20") as pull:
            until(lambda: any(map(any_bytes, incomplete(output))), pull)
            apply(path)
            _, err = pull.communicate(timeout=60)
        if changes:
            assert pull.returncode in {9, 12}, err
            assert not output.exists()
            assert server.wait(timeout=30) == exits.STATUS[SourceChanged]
            assert f"{path} was changed while it was served" in server.communicate()[1]
        else:
            assert pull.returncode == 0, err
            assert_same_state(load_file(output), large())
            assert server.poll() is None
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=30) == 0


def any_bytes(partial: Path) -> bool:
    """Whether something of the payload has arrived behind the first MiB."""
    with partial.open("rb") as file:
        file.seek(2 * MIB)
        return file.read(2 * MIB).strip(b"\0") != b""


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_a_stock_receiver_is_not_given_another_file(published: Any, open_stock: Any, tmp_path: Path) -> None:
    path = written(large(), tmp_path / "served")
    metadata = published(path)
    replaced(path)
    got = open_stock().recv_checkpoint(0, metadata, 5, TIMEOUT)
    assert_same_state(got, large())


def test_a_file_that_is_replaced_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: Any
) -> None:
    path = written(large(), tmp_path / "served")
    before = mapped.Mapping

    def replacing(name: Path) -> Any:
        replaced(path)
        return before(name)

    monkeypatch.setattr(mapped, "Mapping", replacing)
    with pytest.raises(SourceChanged, match="while it was opened"):
        published(path)
    assert ServedFiles().changed() == []


def test_a_source_that_is_shortened_is_not_converted(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorferry.cli import conversion

    path = written(large(), tmp_path / "a.safetensors")
    before = conversion.values_of

    def shortening(state: Any) -> Any:
        os.truncate(path, 8192)
        return before(state)

    monkeypatch.setattr(conversion, "values_of", shortening)
    told = run("convert", path, tmp_path / "b", "--to", "safetensors")
    assert (told.status, told.err.count("\n")) == (12, 1), told.err
    assert "was changed while it was converted" in told.err
    assert not (tmp_path / "b").exists()


def test_a_bus_error_elsewhere_still_ends_the_process(tmp_path: Path) -> None:
    """The handler for the pages of files leaves all other addresses to the system."""
    block = f"""
import mmap, os
from tensorferry._native import FilePages
path = {str(tmp_path / "file")!r}
open(path, "wb").write(bytes(1 << 20))
pages = FilePages(path)
with open(path, "r+b") as file:
    other = mmap.mmap(file.fileno(), 0)
os.truncate(path, 0)
view = memoryview(pages)
assert view[500_000] == 0 and not pages.is_unchanged
print("ready", flush=True)
other[500_000]
"""
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, b"ready\n"), done.stderr
