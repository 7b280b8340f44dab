"""``serve``, ``inspect``, ``diff`` and ``verify`` on every form of a checkpoint, and hostile files for every verb."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import checkpoint_ranks
from commands import (
    FORMS,
    PLAIN,
    TIMEOUT,
    command,
    copied,
    damage,
    make_state,
    plain_file,
    serving,
    write_archive,
)
from equality import assert_same_state
from tensorferry import HTTPTransport
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.cli import exits
from tensorferry.dcp import PeerReader

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.beyond_torchft,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


# serve


@pytest.mark.process
@pytest.mark.parametrize("form", ["file", "checkpoint"])
def test_what_is_served_is_received_as_from_a_transport(form: str, forms: dict[str, Path]) -> None:
    with serving(forms[form], "--step", "3") as metadata, HTTPTransport(TIMEOUT, interface="127.0.0.1") as receiver:
        assert_same_state(receiver.recv_checkpoint(0, metadata[0], 3, TIMEOUT), make_state())


@pytest.mark.process
def test_a_distributed_checkpoint_is_served_to_peer_readers(forms: dict[str, Path]) -> None:
    state = make_state()
    target = {key: torch.zeros_like(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
    with serving(forms["distributed"]) as metadata:
        dcp.load(target, storage_reader=PeerReader(metadata[0]))
    assert all(torch.equal(target[key], state[key]) for key in target)


@pytest.mark.process
def test_a_safetensors_file_is_served_without_torch(
    forms: dict[str, Path], run: Callable[..., Any], tmp_path: Path
) -> None:
    with serving(forms["plain"]) as metadata:
        with HTTPTransport(TIMEOUT, interface="127.0.0.1") as receiver:
            assert_same_state(receiver.recv_checkpoint(0, metadata[0], 0, TIMEOUT), PLAIN)
        assert run("pull", metadata[0], "-o", tmp_path / "a").status == 0
    assert_same_state(load_file(tmp_path / "a"), PLAIN)


@pytest.mark.process
def test_the_port_is_the_one_that_was_asked_for(forms: dict[str, Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        with command("serve", forms["plain"], "--interface", "127.0.0.1", "--port", port) as process:
            assert "SystemRefused" in process.communicate(timeout=30)[1]
            assert process.returncode == exits.UNAVAILABLE
    with serving(forms["plain"], "--port", port) as metadata:
        assert f"127.0.0.1:{port}/" in metadata[0]


@pytest.mark.parametrize("form", ["file", "archive", "checkpoint", "distributed"])
def test_a_damaged_checkpoint_is_not_served(form: str, forms: dict[str, Path], tmp_path: Path, run: Any) -> None:
    path = copied(forms[form], tmp_path)
    damage(next(path.glob("rank*")) if path.is_dir() else path, 100_000)
    assert run("serve", path, "--interface", "127.0.0.1").status == 4


# inspect


@pytest.mark.parametrize("form", ["file", "archive", "checkpoint", "distributed", "torch"])
def test_the_leaves_are_listed(form: str, forms: dict[str, Path], run: Callable[..., Any]) -> None:
    (told,) = run("inspect", forms[form], "--json").json
    leaves = {leaf["path"]: leaf for leaf in told["leaves"]}
    assert leaves["model.weight"]["shape"] == [300, 200]
    assert leaves["half"]["dtype"] == "bfloat16"
    assert (leaves["view"]["dtype"], leaves["view"]["shape"], leaves["view"]["bytes"]) == ("int64", [6], 48)
    assert leaves["empty"]["bytes"] == 0
    assert leaves["step"]["kind"] == "object"
    shown = run("inspect", forms[form])
    assert shown.status == 0
    assert all(path in shown.out for path in leaves)


def test_what_shares_memory_is_said(forms: dict[str, Path], run: Callable[..., Any]) -> None:
    shown = run("inspect", forms["file"]).out
    (line,) = [line for line in shown.splitlines() if line.startswith("model.tied")]
    assert "model.weight" in line
    assert "parameter, requires grad" in shown


def test_the_largest_leaves_come_once_more(run: Callable[..., Any], publish: Any) -> None:
    metadata = publish({f"{i:02}": torch.zeros(i) for i in range(30)})
    shown = run("inspect", metadata, "--largest", "2").out.partition("largest:")[2]
    assert [line.split()[0] for line in shown.splitlines()[2:]] == ["29", "28"]


@pytest.mark.parametrize("secret", [None, "a secret of sixteen bytes"])
def test_digests_are_those_of_the_bytes(
    secret: str | None, forms: dict[str, Path], run: Callable[..., Any], publish: Any, monkeypatch: Any
) -> None:
    def digests(*arguments: object) -> dict[str, str]:
        (told,) = run("inspect", *arguments, "--digests", "--json").json
        return {leaf["path"]: leaf["digest"] for leaf in told["leaves"] if leaf["kind"] == "tensor"}

    if secret:
        monkeypatch.setenv("TENSORFERRY_SECRET", secret)
    known = digests(forms["file"])
    assert known["model.weight"] not in (None, known["model.bias"])
    # At a peer without a secret, in a file without checksums, and from memory.
    assert set(digests(publish(make_state())).values()) == ({None} if secret else set(known.values()))
    archive = digests(forms["archive"])
    assert all(archive[path] == digest for path, digest in known.items() if path in archive)
    assert len(digests(forms["plain"])) == 2


def test_names_cannot_command_the_terminal(run: Callable[..., Any], publish: Any, tmp_path: Path) -> None:
    name = "\x1b]0;owned\x07\x1b[2J\u202etxt"
    metadata = publish({name: torch.ones(2), "nested": {name: 3}})
    assert run("pull", metadata, "-o", tmp_path / name).status == 0
    for arguments in (["inspect", metadata], ["inspect", tmp_path / name], ["verify", tmp_path / name]):
        shown = run(*arguments)
        assert shown.status == 0
        assert "\x1b" not in shown.out + shown.err
        assert "\u202e" not in shown.out + shown.err
        assert r"\x1b]0;owned\x07" in shown.out
    other = publish({name: torch.zeros(2), "nested": {name: 4}})
    shown = run("diff", metadata, other)
    assert shown.status == exits.NO
    assert "\x1b" not in shown.out
    assert "\x1b" not in run("inspect", metadata, "--json").out


# diff


@pytest.mark.parametrize("other", ["archive", "checkpoint", "distributed", "torch", "peer"])
@pytest.mark.parametrize("one", ["file", "archive", "distributed"])
def test_one_state_in_two_forms_is_the_same(
    one: str, other: str, forms: dict[str, Path], run: Callable[..., Any], publish: Any
) -> None:
    there = publish(make_state()) if other == "peer" else forms[other]
    done = run("diff", forms[one], there)
    assert (done.status, done.out) == (0, ""), done.out
    told = run("diff", forms[one], there, "--json").json
    if one == "file" and other in ("checkpoint", "peer"):
        assert told["by_bytes"] == 0
    if (one, other) == ("distributed", "distributed"):
        assert told["by_bytes"] == 0


def test_what_differs_is_named(run: Callable[..., Any], publish: Any) -> None:
    before = publish(make_state())
    changed = make_state()
    changed["model"]["bias"][3] += 1
    changed["half"] = changed["half"].float()
    changed["view"][0] = 99
    changed["step"] = 13
    changed["more"] = changed.pop("scalar")
    done = run("diff", before, publish(changed))
    assert done.status == exits.NO
    assert done.out.splitlines() == [
        "model.bias: the bytes differ",
        "half: bfloat16 [70, 3] and float32 [70, 3]",
        "scalar: only in the first",
        "view: the values differ",
        "step: the values differ",
        "more: only in the second",
    ]


def test_equal_numbers_and_texts_are_values_of_their_own(run: Callable[..., Any], publish: Any) -> None:
    """Python has one object for small numbers and some texts, wherever they stand."""

    def state(step: int) -> dict[str, Any]:
        return {"last": step, "step": step, "on": True, "off": True, "none": None, "a": "x", "b": "x", "rate": step / 1}

    before, after = publish(state(8)), publish(state(9))
    [shown] = run("inspect", before, "--json").json
    assert {leaf["path"]: leaf["kind"] for leaf in shown["leaves"]} == dict.fromkeys(state(8), "object")
    assert [leaf["notes"] for leaf in shown["leaves"]] == [[]] * 8
    done = run("diff", before, after)
    assert done.status == exits.NO
    assert done.out.splitlines() == ["last: the values differ", "step: the values differ", "rate: the values differ"]


def test_an_error_of_diff_is_no_difference(run: Callable[..., Any], forms: dict[str, Path], tmp_path: Path) -> None:
    assert run("diff", forms["file"], tmp_path / "none").status == 3
    assert run("diff", forms["file"]).status == exits.USAGE


def test_nan_is_the_same_as_itself_and_minus_zero_is_not_zero(run: Callable[..., Any], publish: Any) -> None:
    one = publish({"a": torch.tensor([float("nan"), 0.0])})
    assert run("diff", one, publish({"a": torch.tensor([float("nan"), 0.0])})).status == 0
    assert run("diff", one, publish({"a": torch.tensor([float("nan"), -0.0])})).status == exits.NO


# verify


@pytest.mark.parametrize("form", ["file", "archive", "checkpoint", "distributed"])
def test_every_damaged_byte_is_found(
    form: str, forms: dict[str, Path], run: Callable[..., Any], tmp_path: Path
) -> None:
    path = copied(forms[form], tmp_path)
    assert run("verify", path).status == 0
    file = next(path.glob("rank*")) if path.is_dir() else path
    damage(file, 100_000)
    done = run("verify", path)
    assert done.status == 4
    if form != "archive":
        assert "model." in done.out
        bad = [one for one in run("verify", path, "--json").json["files"] if one["damaged"]]
        assert [(one["path"], len(one["damaged"])) for one in bad] == [(str(file), 1)]
        assert bad[0]["damaged"][0]["end"] - bad[0]["damaged"][0]["start"] == 512


def test_damage_in_each_part_of_a_file(forms: dict[str, Path], run: Callable[..., Any], tmp_path: Path) -> None:
    size = forms["file"].stat().st_size
    for offset in (0, 20, 4096, size // 2, size - 5000, size - 20, size - 1):
        path = copied(forms["file"], tmp_path)
        damage(path, offset)
        assert run("verify", path).status == exits.UNREADABLE, offset
    with path.open("r+b") as file:
        file.truncate(size - 1)
    assert run("verify", path).status == 4


def test_a_file_without_checksums_is_not_called_verified(forms: dict[str, Path], run: Callable[..., Any]) -> None:
    done = run("verify", forms["plain"])
    assert done.status == exits.NO
    assert "no checksums" in done.out
    done = run("verify", forms["torch"])
    assert done.status == exits.NO
    assert "no checksums" in done.out
    told = run("verify", forms["torch"], "--json").json
    assert (told["verified"], [one["checksums"] for one in told["files"]]) == (False, [False])


@pytest.mark.parametrize("verb", ["inspect", "verify", "convert"])
@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        (
            lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04junk"),
            4,
            "/.metadata: the pickle cannot",
        ),
        (lambda folder: (folder / ".metadata").write_bytes(b""), 4, "/.metadata: the pickle cannot"),
        (lambda folder: next(folder.glob("*.distcp")).unlink(), 3, "its index names __0_0.distcp, and there is no"),
        (lambda folder: os.truncate(next(folder.glob("*.distcp")), 3000), 4, "__0_0.distcp is cut off"),
    ],
    ids=["junk", "an empty index", "no file", "a cut file"],
)
def test_a_damaged_folder_of_torchs_is_refused_with_the_file(
    verb: str, change: Any, status: int, text: str, forms: dict[str, Path], run: Callable[..., Any], tmp_path: Path
) -> None:
    folder = copied(forms["torch"], tmp_path)
    change(folder)
    # What is listed is what the index says.
    if verb == "inspect" and ".metadata" not in text:
        status, text = 0, ""
    done = run(verb, folder, *([tmp_path / "b", "--to", "tensorferry"] if verb == "convert" else []))
    assert (done.status, text in done.err) == (status, True), done


@pytest.mark.parametrize("verb", ["inspect", "verify", "convert"])
def test_a_file_whose_manifest_is_none_is_named(verb: str, run: Callable[..., Any], tmp_path: Path) -> None:
    header = json.dumps({"__tensorferry__/manifest": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"{}")
    done = run(verb, path, *([tmp_path / "b", "--to", "torch"] if verb == "convert" else []))
    assert (done.status, f"{path}: its manifest is not valid: manifest has no field" in done.err) == (4, True), done


def test_a_missing_file_of_a_checkpoint(forms: dict[str, Path], run: Callable[..., Any], tmp_path: Path) -> None:
    for form in ("checkpoint", "distributed"):
        path = copied(forms[form], tmp_path)
        next(path.glob("rank*")).unlink()
        for verb in ("verify", "serve"):
            assert run(verb, path).status == 3, (form, verb)


def test_a_file_of_another_save_under_the_name(forms: dict[str, Path], run: Callable[..., Any], tmp_path: Path) -> None:
    for form in ("checkpoint", "distributed"):
        path = copied(forms[form], tmp_path)
        (tmp_path / "other").mkdir(exist_ok=True)
        FORMS[form][0](make_state(), tmp_path / "other" / form)
        shutil.copy(next((tmp_path / "other" / form).glob("rank*")), next(path.glob("rank*")))
        for verb, *more in (
            ["verify"],
            ["inspect", "--digests"],
            ["convert", tmp_path / "a.pt"],
            ["serve", "--interface", "127.0.0.1"],
            ["diff", path],
        ):
            done = run(verb, path, *more)
            assert done.status == 4, (form, verb, done)
            assert "but another one" in done.err
        assert not (tmp_path / "a.pt").exists()


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("touch owned",)


@pytest.mark.process
def test_pickles_are_read_with_the_allow_list_only(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(2), "b": Harmful()}, "evil.pt")
    (tmp_path / "folder").mkdir()
    with Path("folder/.metadata").open("wb") as file:
        pickle.dump(Harmful(), file)
    shown = run("inspect", "evil.pt")
    assert shown.status == 0
    assert "posix.system, not on the allow-list" in shown.out
    for arguments in (
        ["convert", "evil.pt", "a.safetensors"],
        ["diff", "evil.pt", "evil.pt"],
        ["inspect", "folder"],
        ["convert", "folder", "a.safetensors"],
    ):
        done = run(*arguments)
        assert done.status == exits.UNREADABLE, (arguments, done.err)
    assert sorted(os.listdir()) == ["evil.pt", "folder"]


def test_hostile_files_end_with_a_typed_error(run: Callable[..., Any], tmp_path: Path) -> None:
    huge = json.dumps({"w": {"dtype": "U8", "shape": [1 << 62], "data_offsets": [0, 1 << 62]}}).encode()
    files = {
        "empty": b"",
        "short": b"\x08",
        "length": struct.pack("<Q", 1 << 63),
        "huge": struct.pack("<Q", len(huge)) + huge,
        "zip": b"PK\x03\x04" + bytes(100),
        "deep": struct.pack("<Q", 200_000) + b"[" * 200_000,
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        for verb in (["inspect"], ["verify"], ["convert", "--to", "torch"], ["serve", "--interface", "127.0.0.1"]):
            out = [tmp_path / "out"] if verb[0] == "convert" else []
            done = run(verb[0], tmp_path / name, *out, *verb[1:])
            assert done.status == exits.UNREADABLE, (name, verb, done.err)
            assert len(done.err.splitlines()) <= 1
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        assert run("inspect", path).status == exits.UNREADABLE
    assert run("inspect", "").status == exits.USAGE


def test_an_index_that_leads_out_of_its_folder(run: Callable[..., Any], tmp_path: Path) -> None:
    from tensorferry.cli.distributed import index_container
    from tensorferry.storage import reserved

    fields = {"version": 1, "sources": ["../secret.safetensors"], "state": {}, "planner": None}
    files = {"began": 0, "files": {"../secret.safetensors": "0" * 16}}
    control = [
        (reserved.INDEX, json.dumps(fields).encode()),
        (reserved.INDEX_FILES, json.dumps(files).encode()),
    ]
    plain_file(tmp_path / "secret.safetensors")
    (tmp_path / "f").mkdir()
    index_container(control).write(tmp_path / "f" / "index.safetensors", partial=tmp_path / "f" / "partial")
    for verb in ("serve", "verify", "inspect"):
        done = run(verb, tmp_path / "f", *(["--digests"] if verb == "inspect" else []))
        assert done.status == exits.UNREADABLE, (verb, done.err)
        assert "is not the name of a rank's file" in done.err


@pytest.mark.process
def test_a_folder_of_megatrons_is_served_and_shown(
    run: Callable[..., Any], forms: dict[str, Path], tmp_path: Path
) -> None:
    folder = copied(forms["distributed"], tmp_path)
    (folder / "metadata.json").write_text('{"sharded_backend": "tensorferry", "sharded_backend_version": 1}')
    for verb in ("inspect", "verify"):
        assert run(verb, folder).status == exits.OK
    assert run("diff", folder, forms["distributed"]).status == exits.OK
    write_archive({"lr": torch.arange(1000.0)}, folder / "common.pt")
    done = run("verify", folder)
    assert (done.status, "common.pt: all bytes match" in done.out) == (exits.OK, True)
    damage(folder / "common.pt", 2000)
    done = run("verify", folder)
    assert (done.status, "common.pt is damaged: record" in done.out) == (4, True)
    (folder / "common.pt").unlink()
    with serving(folder) as (metadata,):
        state = {"model": {"bias": torch.zeros(200)}}
        dcp.load(state, storage_reader=PeerReader(metadata))
    assert torch.equal(state["model"]["bias"], make_state()["model"]["bias"])
    theirs = copied(forms["torch"], tmp_path)
    (theirs / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    assert run("inspect", theirs).status == exits.OK
    refused = run("serve", theirs)
    assert refused.status == exits.USAGE
    assert "--to dcp" in refused.err


@pytest.mark.process
def test_checkpoints_of_different_numbers_of_ranks_are_compared(run: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint_ranks.run("save", 2, tmp_path / "two")
    state = SyncCheckpointer().load(tmp_path / "two")
    saver = SyncCheckpointer()
    saver.save(str(tmp_path / "one"), state)
    told = run("diff", tmp_path / "one", tmp_path / "two", "--json")
    assert told.status == exits.OK, told.out + told.err
    state["rows"][7, 3] += 1
    saver.save(str(tmp_path / "other"), state)
    saver.close()
    for pair in (("other", "two"), ("two", "other")):
        told = run("diff", *(tmp_path / name for name in pair), "--json")
        assert told.status == exits.NO
        assert told.json["differences"] == [{"path": "rows", "how": "the bytes differ"}]
