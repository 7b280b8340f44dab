"""``tensorferry pull``: verified, resumed, and clean after an interruption."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoint_loads import load_state
from commands import command, incomplete, make_state, serving, until, write_distributed
from equality import assert_same_state
from nights import mostly_at_night
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.cli import exits
from tensorferry.cli.download import Download, partial_of
from tensorferry.cli.peers import TIMEOUT, open_source
from tensorferry.dcp import FileReader, PeerWriter
from tensorferry.errors import InvalidArgument, ProtocolError, SystemRefused, UnprovenSource
from tensorferry.memory.accelerator import ACCELERATOR
from tensorferry.memory.staging import HostStager
from tensorferry.state.snapshot import StateSnapshot
from tensorferry.storage import commits
from tensorferry.storage.folder import INDEX
from tensorferry.storage.folder_save import FolderSave, SaveId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.beyond_torchft]


SECRET = "a secret of sixteen bytes"


def large() -> dict[str, Any]:
    """A state of 24 MiB, so of many blocks."""
    generator = torch.Generator().manual_seed(1)
    return {str(i): torch.randn(3 << 18, generator=generator) for i in range(8)}


def test_a_file_that_was_pulled_is_the_state(run: Callable[..., Any], publish: Any, tmp_path: Path) -> None:
    metadata = publish(make_state())
    told = run("pull", metadata, "-o", tmp_path / "a.safetensors", "--json").json
    assert (told["step"], told["path"]) == (5, str(tmp_path / "a.safetensors"))
    assert_same_state(load_file(tmp_path / "a.safetensors"), make_state())
    assert run("verify", tmp_path / "a.safetensors").status == 0
    # The same bytes, whenever and by whomever it is pulled.
    assert run("pull", metadata, "-o", tmp_path / "b.safetensors").status == 0
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]


def test_a_folder_that_was_pulled_is_a_checkpoint(run: Callable[..., Any], publish: Any, tmp_path: Path) -> None:
    assert run("pull", publish(make_state(), step=9), "--into-folder", tmp_path / "c").status == 0
    assert_same_state(SyncCheckpointer().load(tmp_path / "c"), make_state())
    # Into a folder that has a checkpoint, which is replaced.
    other = {"other": torch.ones(3)}
    assert run("pull", publish(other), "--into-folder", tmp_path / "c").status == 0
    assert_same_state(SyncCheckpointer().load(tmp_path / "c"), other)
    assert len(os.listdir(tmp_path / "c")) == 2
    assert run("verify", tmp_path / "c").status == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_distributed_checkpoint_is_pulled_into_a_folder(run: Callable[..., Any], tmp_path: Path) -> None:
    writer = PeerWriter(interface="127.0.0.1")
    try:
        dcp.save(make_state(), storage_writer=writer)
        assert run("pull", writer.metadata()).status == exits.USAGE
        for _ in range(2):
            done = run("pull", writer.metadata(), "--into-folder", tmp_path / "d")
            assert done.status == 0, done.err
    finally:
        writer.shutdown()
    target = {key: torch.zeros_like(value) for key, value in make_state().items() if isinstance(value, torch.Tensor)}
    dcp.load(target, storage_reader=FileReader(tmp_path / "d"))
    assert len(target) == 4
    assert all(torch.equal(value, make_state()[key]) for key, value in target.items())
    assert run("verify", tmp_path / "d").status == 0
    assert sorted(name[:4] for name in os.listdir(tmp_path / "d")) == [".met", "inde", "rank"]


def test_the_states_of_several_ranks_become_a_checkpoint_of_as_many(
    run: Callable[..., Any], publish: Any, tmp_path: Path
) -> None:
    states = [{"w": torch.full((1000,), float(rank)), "names": {f"rank {rank}"}} for rank in range(3)]
    urls = [publish(state) for state in states]
    for _ in range(2):  # The second replaces the first.
        done = run("pull", f"tensorferry-dcp/1 5 {' '.join(urls)}", "--into-folder", tmp_path / "d", "--json")
        assert (done.status, done.json["step"]) == (0, 5), done
        for rank, state in enumerate(states):
            assert_same_state(load_state(tmp_path / "d", rank=rank, world_size=3), state)
        assert run("verify", tmp_path / "d").status == 0
        assert sorted(name[:9] for name in os.listdir(tmp_path / "d") if name[0] != ".") == [
            "index.saf",
            *(f"rank0000{rank}" for rank in range(3)),
        ]


def left_by_pull(metadata: str, path: Path) -> Path:
    """Where a pull that was interrupted has left what came of what a source serves."""
    remote, step = open_source([metadata], None, TIMEOUT)
    with contextlib.closing(remote):
        return partial_of(path, remote, step)


@pytest.mark.parametrize("same_host", mostly_at_night([True, False]))
def test_what_is_there_is_not_fetched_again(
    same_host: bool, run: Callable[..., Any], publish: Any, tmp_path: Path
) -> None:
    metadata, path = publish(large(), same_host=same_host), tmp_path / "a.safetensors"
    assert run("pull", metadata, "-o", path).status == 0
    whole = path.read_bytes()
    # As after a power failure: some pages were written and others were not, and one has a flipped bit.
    left = bytearray(whole)
    start = int.from_bytes(whole[:8], "little") + 8
    left[start + (10 << 20) : start + (12 << 20)] = bytes(2 << 20)
    left[start + (20 << 20) + 5] ^= 1
    left_by_pull(metadata, path).write_bytes(left)
    path.unlink()
    told = run("pull", metadata, "-o", path, "--json").json
    assert path.read_bytes() == whole
    # Three blocks, and the first one, which comes along with the header.
    assert told["fetched"] == 4 << 20
    assert told["bytes"] == sum(tensor.nbytes for tensor in large().values()) + told["bytes"] % (1 << 20)


def test_the_rest_of_another_state_is_not_kept(run: Callable[..., Any], publish: Any, tmp_path: Path) -> None:
    before, after = large(), {name: tensor + 1 for name, tensor in large().items()}
    path = tmp_path / "a.safetensors"
    assert run("pull", publish(before), "-o", path).status == 0
    # Same header, other bytes; and something else entirely.
    metadata = publish(after)
    path.rename(left_by_pull(metadata, path))
    assert run("pull", metadata, "-o", path).status == 0
    assert_same_state(load_file(path), after)
    left_by_pull(metadata, path).write_bytes(b"\x00" * 100)
    assert run("pull", publish(before), "-o", path).status == 0
    assert_same_state(load_file(path), before)


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_pull_goes_on(
    how: signal.Signals, run: Callable[..., Any], publish: Any, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    metadata = publish(large(), max_bandwidth=16 << 20)
    path = tmp_path / "a.safetensors"
    kills = pytestconfig.getoption("--pull-kills") if how == signal.SIGKILL else 1
    for kill in range(kills):
        with command("pull", metadata, "-o", path) as process:
            until(partial_with(path, 4 + kill % 3), process)
            process.send_signal(how)
            _, err = process.communicate(timeout=30)
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[how]
        if how != signal.SIGKILL:
            assert err.splitlines()[0].startswith(f"{incomplete(path)[0]} holds what has arrived")
            assert len(err.splitlines()) == 2
        assert not path.exists()
    told = run("pull", metadata, "-o", path, "--json").json
    assert told["fetched"] < 22 << 20
    assert_same_state(load_file(path), large())


def partial_with(path: Path, blocks: int) -> Callable[[], bool]:
    """Whether the incomplete file of ``path`` has so many blocks by now."""
    return lambda: any(blocks_in(partial) >= blocks for partial in incomplete(path))


def blocks_in(partial: Path) -> int:
    """How many blocks of a file are there, to their ends."""
    with partial.open("rb") as file:
        file.seek(4096)
        count = 0
        while part := file.read(1 << 20):
            count += all(end.strip(b"\0") for end in (part[: 1 << 10], part[-1 << 10 :]))
    return count


def test_a_source_with_secret_and_tls(
    run: Callable[..., Any], publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = publish(large(), secret=SECRET, tls=True)
    assert run("pull", metadata, "-o", tmp_path / "b").status in (exits.UNAVAILABLE, exits.UNPROVEN)
    key = tmp_path / "key"
    key.write_text(f"{SECRET}\n")
    monkeypatch.setenv("TENSORFERRY_SECRET_FILE", str(key))
    monkeypatch.setenv("TENSORFERRY_TLS", "1")
    assert run("pull", metadata, "-o", tmp_path / "a").status == 0
    assert_same_state(load_file(tmp_path / "a"), large())
    (tmp_path / "a").rename(left_by_pull(metadata, tmp_path / "a"))
    assert run("pull", metadata, "-o", tmp_path / "a", "--json").json["fetched"] == 1 << 20
    key.write_text("another secret of 16 bytes")
    assert run("pull", metadata, "-o", tmp_path / "b").status in (exits.UNAVAILABLE, exits.UNPROVEN)
    key.unlink()
    assert run("pull", metadata, "-o", tmp_path / "b").status == exits.USAGE
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("metadata", "status"),
    [
        ("http://127.0.0.1:9/checkpoint/", exits.USAGE),
        ("http://", exits.USAGE),
        ("ftp://127.0.0.1/x/checkpoint/", exits.USAGE),
        ("\x1b[31m", exits.USAGE),
        (f"http://127.0.0.1:1/{'0' * 32}/checkpoint/", 9),
        ("tensorferry-dcp/1 99999999999999999999 http://127.0.0.1:1/x/checkpoint/", exits.USAGE),
        ("tensorferry-dcp/1 1 ../../etc/passwd", exits.USAGE),
        (f"http://127.0.0.1:99999/{'0' * 32}/checkpoint/", exits.USAGE),
        (f"http://[::1/{'0' * 32}/checkpoint/", exits.USAGE),
    ],
)
def test_metadata_that_is_none(metadata: str, status: int, run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("pull", metadata, "--into-folder", tmp_path / "f", "--timeout", "2")
    assert done.status == status, done.err
    assert "Traceback" not in done.err
    assert "\x1b" not in done.err


class Announced:
    """A source that announces one entry, and would have nothing to send."""

    def __init__(self, nbytes: int, name: str = "w") -> None:
        self.names, self.dtypes, self.shapes = [name], ["U8"], [(nbytes,)]
        self.starts, self.sizes, self.about = [0], [nbytes], [("format", "pt")]


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (Announced(1 << 50), SystemRefused, "no room"),
        (Announced((1 << 62) + 7), SystemRefused, "no room"),
        (Announced(8, "__tensorferry__/digests"), ProtocolError, "only files have"),
    ],
)
def test_a_source_of_which_nothing_can_be_stored(source: Any, error: type, text: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=text):
        Download(source, tmp_path / "a.partial")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_to(run: Callable[..., Any], publish: Any, tmp_path: Path) -> None:
    metadata = publish(make_state())
    (tmp_path / "file").write_text("")
    assert run("pull", metadata, "-o", tmp_path / "none" / "a").status == exits.UNAVAILABLE
    assert run("pull", metadata, "--into-folder", tmp_path / "file" / "a").status == exits.UNAVAILABLE


def test_the_transport_of_torchft_is_named(run: Callable[..., Any], open_stock: Any) -> None:
    stock = open_stock()
    done = run("pull", stock.metadata())
    assert done.status == exits.USAGE
    assert "torchft" in done.err


def test_a_download_is_resumed_only_where_it_is_the_same(tmp_path: Path) -> None:
    first = Download(Announced(10_000), tmp_path / "a.partial")  # type: ignore[arg-type]
    assert not first.resumed
    with pytest.raises(InvalidArgument, match="another process"):
        Download(Announced(10_000), tmp_path / "a.partial")  # type: ignore[arg-type]
    first.close()
    again = Download(Announced(10_000), tmp_path / "a.partial")  # type: ignore[arg-type]
    assert again.resumed
    again.close()
    other = Download(Announced(10_001), tmp_path / "a.partial")  # type: ignore[arg-type]
    assert not other.resumed
    other.discard()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("plain", [0, 1])
def test_a_rank_that_does_not_encrypt_is_not_left_out(
    plain: int, run: Callable[..., Any], publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [publish({"w": torch.full((100,), float(rank))}, tls=rank != plain) for rank in range(3)]
    metadata = f"tensorferry-dcp/1 5 {' '.join(urls)}"
    same = [publish(make_state(), tls=tls) for tls in (False, True)]
    monkeypatch.setenv("TENSORFERRY_TLS", "1")
    for arguments in (["pull", metadata, "--into-folder", tmp_path / "d"], ["inspect", metadata]):
        done = run(*arguments)
        assert done.status == exits.STATUS[UnprovenSource], done
        assert f"rank {plain}, at 127.0.0.1:" in done.err
    assert not (tmp_path / "d").exists()
    # Of the sources of one state, another is enough.
    assert run("pull", *same, "-o", tmp_path / "a").status == 0


GONE = "http://127.0.0.1:1/x/checkpoint/"


def shown(folder: Path) -> list[str]:
    """What lies in the folder under a name of its own."""
    return sorted(name for name in os.listdir(folder) if name[0] != ".")


def full(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


@pytest.mark.process
def test_a_rank_of_a_distributed_checkpoint_that_is_gone_leaves_no_file_of_the_others(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    write_distributed(full(1), tmp_path / "source")
    with serving(tmp_path / "source") as (metadata,):
        for _ in range(2):
            done = run("pull", f"{metadata} {GONE}", "--into-folder", tmp_path / "d", "--timeout", "5")
            assert done.status == exits.UNAVAILABLE, done.err
            assert os.listdir(tmp_path) == ["source"]
        assert run("pull", metadata, "--into-folder", tmp_path / "d").status == 0
        before = shown(tmp_path / "d")
        # A checkpoint that is there stays whole.
        assert run("pull", f"{metadata} {GONE}", "--into-folder", tmp_path / "d", "--timeout", "5").status != 0
    assert shown(tmp_path / "d") == before
    assert run("verify", tmp_path / "d").status == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_is_saved_during_a_pull_is_replaced_only_by_force(
    ranks: int, run: Callable[..., Any], publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [publish(full(value)) for value in range(ranks)]
    metadata = urls[0] if ranks == 1 else f"tensorferry-dcp/1 5 {' '.join(urls)}"
    assert run("pull", metadata, "--into-folder", tmp_path / "c").status == 0
    # It begins before the pull, which it does not know of.
    saved = FolderSave(tmp_path / "c", SaveId.new(step=99, known=commits.beginnings(tmp_path / "c" / INDEX)))

    def save_right_before(moment: str, _: Path) -> None:
        if moment == "written" and not saved.path.exists():
            saved.write(StateSnapshot(full(99), HostStager(ACCELERATOR), "borrow").container())
            saved.commit()
            saved.close()

    # After the pull's last look before it locks the folder.
    monkeypatch.setattr(commits, "reached", save_right_before)
    done = run("pull", metadata, "--into-folder", tmp_path / "c")
    assert done.status == exits.USAGE, done
    assert "holds a checkpoint already" in done.err
    assert torch.equal(load_state(tmp_path / "c")["w"], full(99)["w"])
    assert shown(tmp_path / "c") == sorted([INDEX, saved.path.name])
    assert run("pull", metadata, "--into-folder", tmp_path / "c", "--force").status == 0
    assert len(shown(tmp_path / "c")) == 1 + ranks


def test_pulls_bring_each_other_what_they_have(publish: Any, tmp_path: Path, run: Callable[..., Any]) -> None:
    # From the source alone, both would take 12 s.
    metadata = publish(large(), max_bandwidth=4 << 20)
    outputs = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with contextlib.ExitStack() as started:
        both = [started.enter_context(command("pull", metadata, "-o", each, "--quiet", "--json")) for each in outputs]
        told = [process.communicate(timeout=100) for process in both]
    assert sum(json.loads(out)["relayed"] for out, _ in told) > 8 << 20, told
    for output in outputs:
        assert_same_state(load_file(output), large())
        assert run("verify", output).status == 0
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]
