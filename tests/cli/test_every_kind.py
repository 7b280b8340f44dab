"""Every verb and reader with every kind of checkpoint: it is taken with its values, or refused with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from commands import TIMEOUT
from kinds import FORMATS, KINDS, check, convert, written
from tensorferry import HTTPTransport
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint, load_file
from tensorferry.cli.places import CheckpointKind, find
from tensorferry.cli.verbs.serve import Publisher, publishers
from tensorferry.dcp import FileReader, PeerReader
from tensorferry.errors import TensorferryError
from tensorferry.net.network import Network
from tensorferry.net.serve import start

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.beyond_torchft,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("with_notes", [False, True], ids=["", "with a metadata.json of the user's"])
@pytest.mark.parametrize("name", KINDS)
def test_verbs(name: str, with_notes: bool, run: Callable[..., Any], tmp_path: Path) -> None:
    kind = KINDS[name]
    if with_notes and not kind.takes_notes:
        pytest.skip("no other file belongs beside it")
    path, same = written(kind, tmp_path, with_notes=with_notes), tmp_path / "same.pt"
    torch.save(kind.state, same)
    check(kind, "inspect", run("inspect", path), 0)
    check(kind, "inspect", run("inspect", path, "--digests"), kind.digests)
    check(kind, "verify", run("verify", path), kind.verify)
    check(kind, "diff", run("diff", path, same), 0)
    for to in FORMATS:
        check(kind, f"convert --to {to}", convert(run, path, tmp_path / to, to), kind.convert)
        if kind.refused is None and not kind.convert and to != "safetensors":
            assert run("diff", tmp_path / to, same).status == 0, to


@pytest.mark.parametrize("name", KINDS)
def test_serve(name: str, run: Callable[..., Any], tmp_path: Path) -> None:
    kind, path = KINDS[name], written(KINDS[name], tmp_path, with_notes=False)
    if kind.refused is not None:
        assert run("serve", path, "--interface", "127.0.0.1").status in (2, 3, 4, 9)
        return
    place = find(str(path))
    publish = publishers().get(place.layout if place.layout is CheckpointKind.DISTRIBUTED else place.kind)
    if publish is None:
        refused = run("serve", path, "--interface", "127.0.0.1")
        assert refused.status == 2
        assert "convert" in refused.err
        return
    server, host = start(30.0, Network(interface="127.0.0.1"))
    publisher = Publisher(server, host, 3, False)
    try:
        [metadata] = publish(publisher, place.path)["metadata"]
        state = {key: torch.zeros_like(value) for key, value in _tensors(kind.state).items()}
        if metadata.startswith("http"):
            with HTTPTransport(TIMEOUT, interface="127.0.0.1") as receiver:
                state = _tensors(receiver.recv_checkpoint(0, metadata, 3, TIMEOUT))
        else:
            dcp.load(state, storage_reader=PeerReader(metadata))
        for key, value in _tensors(kind.state).items():
            assert torch.equal(state[key].view(torch.int32), value.view(torch.int32)), key
    finally:
        server.shutdown(5.0)


def _tensors(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= _tensors(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            found[prefix + key] = value
    return found


#: What each reader takes; it refuses all else with an error of this package.
TAKEN = {
    load_file: {"torch.save", "container"},
    SyncCheckpointer().load: {"torch.save", "container", "checkpointer's", "CheckpointWriter's"},
    lambda path: FileReader(path).read_metadata(): {"FileWriter's", "torch's", "Megatron's", "torch_dist"},
}
#: Those that are refused with their own reason by whatever reads files, or folders.
NAMED = {"legacy": "before release 1.6", "a part": "HuggingFaceStorageReader", "parts": "HuggingFaceStorageReader"}


@pytest.mark.parametrize("name", KINDS)
def test_readers(name: str, tmp_path: Path) -> None:
    path = written(KINDS[name], tmp_path / "below", with_notes=True)
    assert (latest_checkpoint(tmp_path / "below") is not None) == (name == "checkpointer's")
    for number, (read, taken) in enumerate(TAKEN.items()):
        if name in taken:
            read(path)
            continue
        is_named = name in NAMED and number in ((1, 2) if path.is_dir() else (0, 1))
        with pytest.raises(TensorferryError, match=NAMED[name] if is_named else ""):
            read(path)
