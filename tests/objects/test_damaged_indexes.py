"""``latest`` in a bucket: an index that is damaged is no "there is none", and neither is a wrong place."""

from __future__ import annotations

import pytest
import torch

from stores import BUCKET, client
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint
from tensorferry.errors import CorruptCheckpoint, InvalidArgument

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


@pytest.mark.parametrize("data", [b"", b"x" * 4096], ids=["empty", "garbage"])
def test_a_damaged_index_is_passed_over_with_a_warning_and_is_never_none(data, server, caplog):
    checkpointer, s3 = SyncCheckpointer(), client(server.url)
    for step in (1, 2):
        checkpointer.save(f"{server.place}/step-{step}", {"w": torch.ones(3)})
    s3.put_object(Bucket=BUCKET, Key=f"{server.prefix}/step-2/index.safetensors", Body=data)
    assert latest_checkpoint(server.place) == f"{server.place}/step-1"
    assert f"{server.place}/step-2" in caplog.text
    s3.put_object(Bucket=BUCKET, Key=f"{server.prefix}/step-1/index.safetensors", Body=data)
    for newest in (latest_checkpoint, checkpointer.latest):
        with pytest.raises(CorruptCheckpoint, match=f"{server.place}/step-1"):
            newest(server.place)
    s3.close()


def test_a_checkpoint_itself_and_an_object_are_refused(server):
    SyncCheckpointer().save(f"{server.place}/step-1", {"w": torch.ones(3)})
    with pytest.raises(InvalidArgument, match="is a checkpoint itself: give the folder above"):
        latest_checkpoint(f"{server.place}/step-1")
    with pytest.raises(InvalidArgument, match="is an object"):
        latest_checkpoint(f"{server.place}/step-1/index.safetensors")
    assert latest_checkpoint(f"{server.place}/none") is None
