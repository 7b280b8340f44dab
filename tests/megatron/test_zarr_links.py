"""Links in folders of backend zarr: nothing is written or removed through them, and what they lead to can be read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from test_convert import convert
from test_zarr import load_all, try_load
from test_zarr_saved import try_save
from zarr_states import WRITTEN

pytestmark = pytest.mark.nightly


SECRET = b"somebody else's"


@pytest.fixture
def outside(tmp_path):
    """A folder beside the checkpoint, with a file that nobody may change."""
    folder = tmp_path / "outside"
    (folder / "below").mkdir(parents=True)
    (folder / "file").write_bytes(SECRET)
    return folder


def content(folder):
    """What is at and below a folder: links as links, and the bytes of files."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else (path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }


#: Where in a folder the link is, what it leads to, and what the refusal says.
WRITTEN_THROUGH = {
    "array folder": ("rows", "below", "is a link, so 'rows' is not written there: save into another folder"),
    "array folder to nowhere": ("rows", "new", "is a link, so 'rows' is not written there"),
    "metadata of an array": ("rows/.zarray", "file", "rows already exists: save into a folder of its own"),
    "metadata of an array to nowhere": ("rows/.zarray", "new", "rows already exists"),
    "chunk": ("rows/0.0", "file", "rows/0.0 cannot be written"),
    "chunk to nowhere": ("rows/0.0", "new", "rows/0.0 cannot be written"),
    "folder of objects": ("random", "below", "is a link, so 'random/shard_0_2.pt' is not written there"),
    "object": ("random/shard_0_2.pt", "file", "is a link, so 'random/shard_0_2.pt' is not written there"),
}


@pytest.mark.parametrize("name", WRITTEN_THROUGH)
def test_nothing_is_written_through_a_link(ranks, tmp_path, outside, name):
    at, target, text = WRITTEN_THROUGH[name]
    folder = tmp_path / "checkpoint"
    (folder / at).parent.mkdir(parents=True)
    (folder / at).symlink_to(outside / target)
    before = content(outside)
    for message in ranks.run(try_save, str(folder), None):
        assert message is not None
        assert text in message
    assert content(outside) == before
    assert (folder / at).is_symlink()


def test_a_key_does_not_lead_through_a_link_above_its_array(ranks, tmp_path, outside):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "layers.extra_state").symlink_to(outside)
    before = content(outside)
    for message in ranks.run(try_save, str(folder), None):
        assert "layers.extra_state is a link, so 'layers.extra_state/shard_0.0_1.1.pt' is not written" in message
    assert content(outside) == before


def test_a_folder_that_is_a_link_itself_is_saved_into(ranks, tmp_path):
    """It is the user's: the checkpoint lies where it leads to."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoint").symlink_to("disk")
    assert ranks.run(try_save, str(tmp_path / "checkpoint"), None) == [None, None]
    assert (tmp_path / "disk" / "rows" / ".zarray").is_file()


#: Parts of a checkpoint that lie elsewhere, with links in their places.
MOVED = ["rows", "rows/.zarray", "rows/0.0", "random", "random/shard_1_2.pt", "common.pt", "metadata.json"]


def moved(folder, outside, at):
    """Moves a part of a checkpoint out of it, and leaves a link."""
    target = outside / "moved"
    (folder / at).rename(target)
    (folder / at).symlink_to(target)


@pytest.mark.parametrize("at", MOVED)
def test_what_lies_behind_a_link_is_read_and_stays_as_it_was(ranks, alone, tmp_path, outside, at):
    """As those releases read it: a checkpoint may be spread over disks."""
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    moved(folder, outside, at)
    before = content(folder), content(outside)
    assert ranks.run(load_all, str(folder), 10, True) == [[], []]
    assert alone.run(convert, str(folder), str(tmp_path / "output"), {}) == [(15, 3, 1661)]
    assert (content(folder), content(outside)) == before
    assert not [path for path in (tmp_path / "output").rglob("*") if path.is_symlink()]


#: Links that lead to no file of a checkpoint.
BAD_LINKS = {
    "array folder to nowhere": ("rows", lambda outside: outside / "new", "the checkpoint has no tensor 'rows'"),
    "array folder to itself": ("rows", lambda _: "rows", "cannot be read"),
    "metadata of an array to a pipe": ("rows/.zarray", lambda outside: pipe(outside), "is not a regular file"),
    "metadata of an array to another file": (
        "rows/.zarray",
        lambda outside: outside / "file",
        "is not the metadata of an array",
    ),
    "chunk to nowhere": ("rows/0.0", lambda outside: outside / "new", "its chunk 0.0 is missing"),
    "chunk to a pipe": ("rows/0.0", lambda outside: pipe(outside), "is not a regular file"),
    "chunk to a folder": ("rows/0.0", lambda outside: outside / "below", "is not a regular file"),
    "chunk to another file": ("rows/0.0", lambda outside: outside / "file", "is damaged: it has 15 bytes"),
    "object to a pipe": ("random/shard_1_2.pt", lambda outside: pipe(outside), "random/shard_1_2.pt"),
    "object to another file": ("random/shard_1_2.pt", lambda outside: outside / "file", "random/shard_1_2.pt"),
}


@pytest.mark.parametrize("target", [".", "..", "/"])
def test_a_link_back_is_refused_and_not_walked_for_ever(alone, tmp_path, target):
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    (folder / "loop").symlink_to(target)
    [converted] = alone.run(convert, str(folder), str(tmp_path / "output"), {})
    assert "loop is a link to a folder in which it lies itself" in converted
    assert not (tmp_path / "output").exists()


def test_arrays_below_a_folder_that_lies_elsewhere_are_converted(alone, tmp_path, outside):
    """Their keys have a slash; a walk that does not follow the link would leave them out."""
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    shutil.copytree(folder / "rows", outside / "moved" / "0")
    (folder / "moved").symlink_to(outside / "moved")
    [converted] = alone.run(convert, str(folder), str(tmp_path / "output"), {})
    assert converted[0] == 16, converted


def pipe(outside):
    os.mkfifo(outside / "pipe")
    return outside / "pipe"


@pytest.mark.parametrize("name", BAD_LINKS)
def test_links_to_what_is_no_part_of_a_checkpoint_are_refused(ranks, alone, tmp_path, outside, name):
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    at, target, text = BAD_LINKS[name]
    if (folder / at).is_dir():
        shutil.rmtree(folder / at)
    else:
        (folder / at).unlink()
    (folder / at).symlink_to(target(outside))
    before = content(folder), content(outside)
    for kind, message, touched in ranks.run(try_load, str(folder)):
        assert kind == "CheckpointingException"
        assert text in message
        assert not touched
    [converted] = alone.run(convert, str(folder), str(tmp_path / "output"), {})
    # Nothing is left out of what is converted because its link leads nowhere.
    if at == "rows" or name == "chunk to nowhere":
        text = f"{folder / at} is a link that leads nowhere"
    assert text in converted
    assert (content(folder), content(outside)) == before
    assert not (tmp_path / "output").exists()
    assert not list(tmp_path.glob(".output*"))


def remove(kept, folder):
    from megatron.core.dist_checkpointing.core import CheckpointingException

    import tensorferry.megatron as ours

    del kept
    try:
        ours.remove_sharded_tensors(folder, "")
    except CheckpointingException as e:
        return str(e)
    return None


@pytest.mark.parametrize("at", ["rows", "rows/.zarray", "rows/0.0", "random/shard_1_2.pt"])
def test_tensors_of_such_a_folder_are_not_removed(alone, tmp_path, outside, at):
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint"))
    moved(folder, outside, at)
    before = content(folder), content(outside)
    [message] = alone.run(remove, str(folder))
    assert "is of backend 'zarr', and this strategy reads 'tensorferry'" in message
    assert (content(folder), content(outside)) == before
