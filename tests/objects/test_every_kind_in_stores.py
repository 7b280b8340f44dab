"""Every verb with every kind of checkpoint in a bucket: what it makes of one in a folder."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kinds import KINDS, check, convert, written
from stores import BUCKET, client, put_folder
from tensorferry.cli.app import run

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Done(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def command(capsys):
    return lambda *arguments: Done(run([str(argument) for argument in arguments]), *capsys.readouterr())


@pytest.mark.parametrize("name", KINDS)
def test_verbs(name, server, command, tmp_path):
    kind = KINDS[name]
    path, same = written(kind, tmp_path / "here", with_notes=False), tmp_path / "same.pt"
    torch.save(kind.state, same)
    place = f"{server.place}/{kind.name}"
    if path.is_dir():
        put_folder(server.url, path, f"{server.prefix}/{kind.name}")
    else:
        client(server.url).upload_file(str(path), BUCKET, f"{server.prefix}/{kind.name}")
    check(kind, "inspect", command("inspect", place), 0)
    check(kind, "inspect", command("inspect", place, "--digests"), kind.digests)
    check(kind, "verify", command("verify", place), kind.verify)
    check(kind, "diff", command("diff", place, same), 0)
    check(kind, "convert", convert(command, place, tmp_path / "out.pt", "torch"), kind.convert)
    if kind.refused is not None:
        return
    if not kind.convert:
        assert command("diff", tmp_path / "out.pt", same).status == 0
        assert convert(command, path, f"{place}-out.pt", "torch").status == 0
        assert command("diff", f"{place}-out.pt", same).status == 0
    assert command("copy", place, tmp_path / f"copy-{kind.name}").status == 0
    assert command("diff", tmp_path / f"copy-{kind.name}", same).status == 0
    assert command("copy", path, f"{server.place}/copy-{kind.name}").status == 0
    assert command("diff", f"{server.place}/copy-{kind.name}", same).status == 0
