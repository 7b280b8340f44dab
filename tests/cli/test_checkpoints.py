"""``inspect``, ``diff`` and ``verify`` on every form of a checkpoint, and hostile files for every verb."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import checkpoint_ranks
from commands import (
    FORMS,
    copied,
    damage,
    make_state,
    write_archive,
    write_distributed,
    write_torch_distributed,
)
from indexes import written_with
from tensorferry.checkpointing import SyncCheckpointer
from tensorferry.cli import exits, values
from tensorferry.cli.values import are_same
from tensorferry.dcp import FileWriter, PeerWriter
from tensorferry.errors import SystemRefused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.beyond_torchft,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


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


@pytest.mark.parametrize(("one", "other"), [("file", "checkpoint"), ("file", "peer"), ("distributed", "distributed")])
def test_where_both_have_checksums_those_are_compared(
    one: str, other: str, forms: dict[str, Path], run: Callable[..., Any], publish: Any
) -> None:
    there = publish(make_state()) if other == "peer" else forms[other]
    done = run("diff", forms[one], there, "--json")
    assert (done.status, done.json["by_bytes"]) == (0, 0), done


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
    assert run("serve", path, "--interface", "127.0.0.1").status == (2 if form == "archive" else 4)
    refused = run("convert", path, tmp_path / "a.pt")
    assert (refused.status, "damaged" in refused.err, (tmp_path / "a.pt").exists()) == (4, True, False), refused
    if form != "distributed":
        assert run("convert", path, tmp_path / "a.pt", "--unverified").status == 0
    if form != "archive":
        assert "model." in done.out
        bad = [one for one in run("verify", path, "--json").json["files"] if one["damaged"]]
        assert [(one["path"], len(one["damaged"])) for one in bad] == [(str(file), 1)]
        assert bad[0]["damaged"][0]["end"] - bad[0]["damaged"][0]["start"] == 512


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
        for verb in (["inspect"], ["verify"], ["convert", "--to", "torch"]):
            out = [tmp_path / "out"] if verb[0] == "convert" else []
            done = run(verb[0], tmp_path / name, *out, *verb[1:])
            assert done.status == exits.UNREADABLE, (name, verb, done.err)
            assert len(done.err.splitlines()) <= 1
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        assert run("inspect", path).status == exits.UNREADABLE
    assert run("inspect", "").status == exits.USAGE


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
    # The file of one rank alone has no whole tensors.
    (file,) = (tmp_path / "two").glob("*rank00001*")
    for to in ("torch", "safetensors", "dcp", "torch-dcp"):
        done = run("convert", file, tmp_path / "o", "--to", to, *(["--drop-objects"] if to == "safetensors" else []))
        assert done.status == exits.UNREADABLE
        assert "is a part of a tensor that is spread over ranks" in done.err
    assert not (tmp_path / "o").exists()


#: What is wrong with the index of a float32 tensor of 6 elements, and of an object.
WRONG: dict[str, dict[str, list[Any]]] = {
    "another dtype": {"dtypes": ["bfloat16"]},
    "a dtype of the same size": {"dtypes": ["int32"]},
    "another shape": {"boxes": [0, 5]},
    "another entry": {"entry": [1, 1]},
    "no entry": {"entry": [9, 1]},
    "a length that no entry has": {"bytes": [28, 28]},
    "no file": {"file": [1, 0]},
}


def contradicting(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    written_with(monkeypatch, lambda columns: columns.update(WRONG[how]))


STATE = {"w": torch.arange(6.0), "n": 5}


@pytest.mark.parametrize("how", WRONG)
def test_it_is_not_verified(how: str, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save(STATE, storage_writer=FileWriter(tmp_path))
    assert run("verify", tmp_path).status == exits.OK
    contradicting(monkeypatch, how)
    dcp.save(STATE, storage_writer=FileWriter(tmp_path))
    done = run("verify", tmp_path)
    assert done.status == exits.UNREADABLE, done
    assert re.search(r"\bw\b", done.err)


def test_it_is_not_committed_by_a_pull(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PeerWriter(interface="127.0.0.1")
    try:
        contradicting(monkeypatch, "another dtype")
        dcp.save(STATE, storage_writer=writer)
        done = run("pull", writer.metadata(), "--into-folder", tmp_path / "d")
    finally:
        writer.shutdown()
    assert done.status == exits.UNREADABLE, done
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("verb", ["verify", "convert"])
def test_an_archive(verb: str, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    write_archive({str(i): torch.full((1 << 18,), float(i)) for i in range(4)}, path)
    compare = zipfile.ZipFile.testzip

    def cut(archive: zipfile.ZipFile) -> str | None:
        os.truncate(path, path.stat().st_size // 3)
        return compare(archive)

    monkeypatch.setattr(zipfile.ZipFile, "testzip", cut)
    done = run(verb, path, *([tmp_path / "b", "--to", "tensorferry"] if verb == "convert" else []))
    assert (done.status, f"{path} is damaged: it was cut off" in done.out + done.err) == (4, True), done
    assert os.listdir(tmp_path) == ["a.pt"]


class Hostile:
    def __reduce__(self) -> Any:
        raise ValueError("it cannot be pickled")


def quantized(scale: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), scale, 0, torch.quint8)


@pytest.mark.parametrize("error", [SystemRefused(12, "this machine has no memory"), MemoryError()])
def test_no_memory_for_a_comparison_is_no_difference(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(values, "_check_machine_has", refuse)
    view = torch.arange(12.0).reshape(3, 4).t()
    with pytest.raises(type(error)):
        are_same(view, view.clone(memory_format=torch.preserve_format))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (0.0, -0.0, False),
        (complex(0.0, 0.0), complex(0.0, -0.0), False),
        (float("nan"), float("nan"), True),
        (1, True, False),
        ({8, 0}, {0, 8}, True),
        (Counter("aab"), Counter("baa"), True),
        (Hostile(), Hostile(), False),
        (torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), 0.0]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), False),
        (torch.empty(3, device="meta"), torch.empty(3, device="meta"), True),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), True),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse(), False),
    ],
)
def test_bits_are_compared(a: Any, b: Any, same: bool) -> None:
    assert are_same(a, b) == same


def test_quantized_tensors_differ_in_their_scale_alone() -> None:
    assert are_same(quantized(0.5), quantized(0.5))
    assert not are_same(quantized(0.5), quantized(0.25))


@pytest.mark.parametrize("write", [write_distributed, write_torch_distributed])
def test_what_lies_in_one_object_of_a_distributed_checkpoint_is_compared(
    write: Callable[..., None], run: Callable[..., Any], tmp_path: Path
) -> None:
    for name, last in (("a", 2), ("b", 3), ("same", 2)):
        write({"w": torch.ones(2), "numbers": [1, last]}, tmp_path / name)
    assert run("diff", tmp_path / "a", tmp_path / "same").status == exits.OK
    done = run("diff", tmp_path / "a", tmp_path / "b")
    assert (done.status, done.out) == (exits.NO, "numbers.1: the values differ\n")
