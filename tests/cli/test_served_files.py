"""Files that change while ``tensorferry serve`` serves them: what is pulled is what they were, or nothing."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from checkpoint_loads import rank_file, save_state
from commands import TIMEOUT, command, incomplete, until
from equality import assert_same_state
from tensorferry.checkpointing import load_file
from tensorferry.cli import exits, mapped
from tensorferry.cli.mapped import ServedFiles
from tensorferry.cli.places import find
from tensorferry.cli.verbs.serve import Publisher, publishers
from tensorferry.dcp import FileWriter, PeerReader
from tensorferry.errors import SourceChanged
from tensorferry.net.network import Network
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
    rank_file(save_state(path.with_name(f"{path.name}.folder"), state)).rename(path)
    return path


def replaced(path: Path) -> None:
    written(large(100), path.with_name("other")).replace(path)


def in_tensor(path: Path) -> int:
    """A place in the file that is in the middle of a large tensor."""
    return path.stat().st_size // 2


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(in_tensor(path))
        file.write(b"changed")


def truncated(path: Path) -> None:
    os.truncate(path, MIB)


#: How a file changes, and whether its content, which the server holds, does.
CHANGES = {
    "replaced": (replaced, False),
    "overwritten": (overwritten, True),
    "truncated": (truncated, True),
}


@pytest.fixture
def published() -> Iterator[Callable[[Path], str]]:
    """Publishes a file as ``serve`` does, without its look at the file now and then; returns the metadata."""
    servers = []

    def publish(path: Path) -> str:
        server, host = start(5.0, Network(interface="127.0.0.1"))
        servers.append((server, publisher := Publisher(server, host, 5, False)))
        (metadata,) = publishers()[find(str(path)).kind](publisher, path)["metadata"]
        return metadata

    yield publish
    for server, _ in servers:
        server.shutdown(1.0)


@pytest.mark.waits
@pytest.mark.parametrize(("change", "same_host"), [*((change, "0") for change in CHANGES), ("truncated", "1")])
def test_a_pull_gets_what_was_published_or_an_error(
    change: str, same_host: str, published: Any, run: Callable[..., Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TENSORFERRY_SAME_HOST", same_host)
    path = written(large(), tmp_path / "served")
    metadata = published(path)
    apply, changes = CHANGES[change]
    apply(path)
    told = run("pull", metadata, "-o", tmp_path / "after", "--timeout", "5")
    if changes:
        assert told.status == exits.UNAVAILABLE, told.err
        assert len(told.err.splitlines()) == 1
        assert not (tmp_path / "after").exists()
    else:
        assert told.status == 0, told.err
        assert_same_state(load_file(tmp_path / "after"), large())


@pytest.mark.process
def test_a_change_in_the_middle_of_a_pull_ends_both(tmp_path: Path) -> None:
    path, output = written(large(), tmp_path / "served"), tmp_path / "a"
    # A pull that is to fail may take long: this process must come to change the file before it ends.
    with command("serve", path, "--interface", "127.0.0.1", "--max-bandwidth", "1M") as server:
        assert server.stdout is not None
        metadata = server.stdout.readline().strip()
        with command("pull", metadata, "-o", output, "--timeout", "20", env={"TENSORFERRY_SAME_HOST": "0"}) as pull:
            until(lambda: any(map(any_bytes, incomplete(output))), pull)
            truncated(path)
            _, err = pull.communicate(timeout=110)
        assert (pull.returncode, output.exists()) == (exits.UNAVAILABLE, False), err
        assert server.wait(timeout=30) == exits.UNAVAILABLE
        assert f"{path} was changed while it was served" in server.communicate()[1]


def put_back(path: Path, change: Callable[[Path], None]) -> None:
    """Changes a file, and sets its time back to what it was."""
    before = path.stat()
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    ("same_host", "secret", "checked"),
    [("0", False, True), ("0", True, True), ("1", False, True), ("0", False, False)],
    ids=["", "secret", "same host", "without checksums"],
)
def test_a_change_that_no_time_shows_is_noticed(
    same_host: str,
    secret: bool,
    checked: bool,
    published: Any,
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.setenv("TENSORFERRY_SAME_HOST", same_host)
    if secret:
        monkeypatch.setenv("TENSORFERRY_SECRET", "of sixteen or more characters")
    path = written(large(), tmp_path / "served")
    if not checked:
        path.write_bytes(safetensors.torch.save({name: value for name, value in large().items() if name[0] != "s"}))
    metadata = published(path)
    told = run("pull", metadata, "-o", tmp_path / "before", "--timeout", "20")
    assert told.status == 0, told.err
    put_back(path, overwritten)
    told = run("pull", metadata, "-o", tmp_path / "after", "--timeout", "20")
    assert told.status in (exits.UNREADABLE, exits.UNAVAILABLE), told.err
    assert len(told.err.splitlines()) == 1
    assert not (tmp_path / "after").exists()


def test_a_change_through_a_mapping_whose_pages_were_dirty_is_noticed(
    published: Any, run: Callable[..., Any], tmp_path: Path
) -> None:
    path = written(large(), tmp_path / "served")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        at = in_tensor(path)
        # The page is dirty from here on, and its time is that of now.
        mapping[at] = mapping[at]
        metadata = published(path)
        # The kernel may have written the page back meanwhile, and would note the time of the next write then.
        put_back(path, lambda _: mapping.__setitem__(slice(at, at + 7), b"changed"))
        told = run("pull", metadata, "-o", tmp_path / "after", "--timeout", "20")
    assert told.status in (exits.UNREADABLE, exits.UNAVAILABLE), told.err
    assert not (tmp_path / "after").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parts_of_a_tensor_are_compared_with_the_checksums_of_the_file(tmp_path: Path, published: Any) -> None:
    """A reader of slices asks for small blocks; behind an index, they do not begin where those of the file begin."""
    state = {"w": torch.arange(3 << 18), "v": torch.ones(500)}
    dcp.save(state, storage_writer=FileWriter(tmp_path / "saved"))
    metadata = published(tmp_path / "saved")

    def load() -> Any:
        asked = {"w": torch.zeros(3 << 18, dtype=torch.int64)}
        dcp.load(asked, storage_reader=PeerReader(metadata, timeout=TIMEOUT))
        return asked["w"]

    assert torch.equal(load(), state["w"])
    (file,) = (tmp_path / "saved").glob("rank*.safetensors")
    put_back(file, overwritten)
    with pytest.raises(dcp.CheckpointException, match=r"corrupt|no longer served|another snapshot"):
        load()


def any_bytes(partial: Path) -> bool:
    """Whether something of the payload has arrived behind the first MiB."""
    with partial.open("rb") as file:
        file.seek(2 * MIB)
        return file.read().strip(b"\0") != b""


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
    assert (told.status, told.err.count("\n")) == (exits.UNAVAILABLE, 1), told.err
    assert "was changed while it was converted" in told.err
    assert not (tmp_path / "b").exists()
