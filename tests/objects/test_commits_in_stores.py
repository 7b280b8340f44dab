"""What a store does not answer is no reason to replace or remove a checkpoint that may be committed."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from dcp_doors import save

from stores import BUCKET, FORBIDDEN, SLOW_DOWN, client, objects
from tensorferry.checkpointing import SyncCheckpointer
from tensorferry.errors import FetchTimeout, IncompleteCheckpoint, StoreRefused, TensorferryError
from tensorferry.memory.tensors import no_rows
from tensorferry.storage import commits
from tensorferry.storage.container import Container
from tensorferry.storage.folder import INDEX
from tensorferry.storage.folder_save import FolderSave, SaveId
from tensorferry.storage.places import any_place


def place_of(server, seconds=30.0):
    return any_place(server.place, timeout=timedelta(seconds=seconds))


def written(place, began, save="0123456789ab"):
    """Returns a save of one rank that has written, and can commit."""
    made = FolderSave(place, SaveId(save, began))
    made.write(Container(no_rows(), None, True))
    return made


def committed(place, began, save="0123456789ab"):
    made = written(place, began, save)
    made.commit()
    made.close()


def is_index(path):
    return path.partition("?")[0].endswith(f"/{INDEX}")


@pytest.mark.process
@pytest.mark.waits
def test_a_save_whose_commit_got_no_answer_leaves_a_checkpoint_that_loads(gateway, server, days_later):
    checkpointer = SyncCheckpointer(patience=4)
    checkpointer.save(server.place, {"w": torch.full((300,), 1.0)})
    lost = []

    def act(_, method, path):
        if not is_index(path) or (method != "PUT" and not lost):
            return None
        if lost:
            return SLOW_DOWN

        def lose(_):
            lost.append(path)
            raise ConnectionResetError

        return lose

    gateway.act = act
    with pytest.raises(TensorferryError):
        checkpointer.save(server.place, {"w": torch.full((300,), 2.0)})
    assert lost
    gateway.act = lambda *_: None
    # It is committed, although nobody was told.
    assert checkpointer.load(server.place)["w"].unique().item() == 2.0
    days_later()
    checkpointer.save(server.place, {"w": torch.full((300,), 3.0)})
    assert checkpointer.load(server.place)["w"].unique().item() == 3.0
    assert len(objects(server.url, server.prefix)) == 2


@pytest.mark.waits
@pytest.mark.parametrize("answer", [FORBIDDEN, "short"])
def test_a_later_checkpoint_whose_index_cannot_be_read_stays(gateway, server, answer):
    place = place_of(server)
    committed(place, 200)
    later = objects(server.url, server.prefix)
    earlier = written(place, 100, "ba9876543210")

    def shortened(data):
        return data[:-1]

    def act(_, method, path):
        if method != "GET" or not is_index(path):
            return None
        return shortened if answer == "short" else answer

    gateway.act = act
    with pytest.raises(StoreRefused):
        earlier.commit()
    assert later.items() <= objects(server.url, server.prefix).items()
    gateway.act = lambda *_: None
    with pytest.raises(IncompleteCheckpoint, match="began later"):
        earlier.commit()
    assert later == objects(server.url, server.prefix)


@pytest.mark.waits
def test_why_an_index_cannot_be_removed_is_told_as_it_is(gateway, server):
    committed(place_of(server), 1)
    expected = commits.files_of(place_of(server) / INDEX)
    gateway.act = lambda _, method, __: FORBIDDEN if method in ("DELETE", "POST") else None
    with pytest.raises(StoreRefused, match="does not permit it"):
        commits.remove_index(place_of(server) / INDEX, expected)
    gateway.act = lambda _, method, __: "stall" if method in ("DELETE", "POST") else None
    with pytest.raises(FetchTimeout, match="was not over"):
        commits.remove_index(place_of(server, 1.0).begun() / INDEX, expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_store_that_refuses_what_tools_look_for_is_told_as_it_is(gateway, server):
    gateway.act = lambda _, method, path: FORBIDDEN if method == "PUT" and path.endswith("/.metadata") else None
    with pytest.raises(StoreRefused, match=r"does not permit it.*The checkpoint is complete"):
        save({"w": torch.ones(3)}, server.place)


@pytest.mark.parametrize("began", [100, 300])
def test_an_index_that_replaces_this_one_before_it_is_looked_at_is_no_loss(gateway, server, began):
    """It is another writer's, which the store is not blamed for: the later save counts, as at any other moment."""
    other, place = any_place(f"{server.place}/other"), any_place(f"{server.place}/here")
    committed(other, began, "ba9876543210")
    replacing, done = (other / INDEX).read_bytes(), []
    made = written(place, 200)

    def act(_, method, path):
        def replace_it(data):
            done.append(path)
            key = (place / INDEX).key
            client(server.url).put_object(Bucket=BUCKET, Key=key, Body=replacing)
            return data

        return replace_it if method == "PUT" and is_index(path) and not done else None

    gateway.act = act
    if began < 200:
        made.commit()
    else:
        with pytest.raises(IncompleteCheckpoint, match="began later"):
            made.commit()
    assert done
    assert commits.files_of(place / INDEX).began == max(began, 200)
