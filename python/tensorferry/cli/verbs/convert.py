"""``tensorferry convert``: turns a checkpoint of one format into one of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ...errors import InvalidArgument, ProtocolError, TensorferryError
from ...storage.objects.place import ObjectPlace
from ...storage.places import AnyPlace, any_place, is_store_url
from .. import console, copying, exits, places
from ..copies import scratch_folder
from ..places import CheckpointKind

#: What can be written.
Format = Literal["tensorferry", "safetensors", "torch", "checkpoint", "dcp", "torch-dcp"]
#: The format that a suffix stands for.
_SUFFIXES: dict[str, Format] = {".safetensors": "tensorferry", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
#: The formats that are one file.
_FILES = ("tensorferry", "safetensors", "torch")
#: How many names a warning has.
_NAMED = 3
#: Megatron's backends by the formats into which its checkpoints can be converted.
_MEGATRON = {"dcp": "tensorferry", "torch-dcp": "torch_dist"}


def convert(
    source: str,
    output: str,
    /,
    *,
    to: Format | None = None,
    only: str | None = None,
    rank: int | None = None,
    step: int | None = None,
    drop_objects: bool = False,
    unverified: bool = False,
    json: bool = False,
) -> int:
    """Converts a checkpoint to another format: `tensorferry convert checkpoints/step-100 model.pt --only model`.

    Formats: tensorferry (one file of a state, with checksums; the default for .safetensors), safetensors (only tensors,
    for other programs), torch (torch.save; the default for .pt, .pth and .bin), checkpoint (a folder for
    AsyncCheckpointer.load), dcp (a folder for FileReader), torch-dcp (a folder for torch's FileSystemReader, and for
    tools such as torch's format_utils and accelerate merge-weights). The output appears when it is complete. The state
    may be larger than memory.

    If several ranks saved the checkpoint, tensors that are sharded over them (FSDP2, DTensor) become whole, in memory.
    All other values are those of one rank; a key that it lacks comes from the first rank that has it.

    Args:
        source: a safetensors or torch.save file, what curl fetched from a transport, or a folder of a checkpoint; one
            of Megatron becomes dcp or torch-dcp
        output: a file, a folder or a URL of an object store that does not exist yet
        to: the format
        only: convert only what is below this key, such as model or state.model, and remove that prefix from the keys,
            so that load_state_dict takes them
        rank: if several ranks saved the checkpoint, the rank whose values are taken where they are not sharded
            (default: 0)
        step: with --to checkpoint, its step number (default: that of the source)
        drop_objects: with --to safetensors, leave out everything but tensors, instead of refusing it
        unverified: do not compare the source with its checksums first
        json: print the result as one JSON document
    """
    target = any_place(output, "output") if is_store_url(output) else Path(output)
    given = {"only": only, "rank": rank, "step": step, "drop": drop_objects, "verify": not unverified}
    # Once only: a conversion may take long, and what it was to convert has gone.
    format_, facts = places.settled(lambda: _convert(source, target, to, given), source, attempts=1)
    dropped = facts.get("dropped")
    if json:
        console.out_json({"output": str(output), "format": format_, **facts})
    else:
        others = "" if dropped else f" and {facts['objects']} other leaves"
        console.out(f"{output}: {facts['tensors']} tensors{others}, as {format_}")
    if dropped:
        more = f" and {len(dropped) - _NAMED} more (all are in the output of --json)" if len(dropped) > _NAMED else ""
        names = f"{', '.join(dropped[:_NAMED])}{more}"
        console.warn(f"{len(dropped)} leaves are not tensors, and were left out: {names}")
    if facts.get("ranks"):
        console.note(
            f"tensorferry: tensors that are spread over the {facts['ranks']} ranks are whole in the output; all other "
            f"values are those of rank {facts['rank']} (--rank takes another one), and of the first rank that has them "
            "where that one has none"
        )
    return exits.OK


def _convert(source: str, output: AnyPlace, to: str | None, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Converts ``source``; returns the format, and how much there was."""
    place = places.find(source)
    to = to or _SUFFIXES.get(output.suffix)
    if to is None:
        raise InvalidArgument(f"{output} does not say what to write: name a format with --to")
    if place.kind is places.CheckpointKind.PEERS:
        raise InvalidArgument("pull first, then convert: a running peer may change its state meanwhile")
    _check_options(place.kind, to, given)
    if isinstance(output, ObjectPlace):
        return _convert_to_store(source, output, to, given)
    if isinstance(place.path, ObjectPlace):
        with copying.local(place, verify=given["verify"]) as here:
            return _convert(here.text, output, to, given)
    if (_SUFFIXES.get(output.suffix, to) == "torch") != (to == "torch"):
        console.warn(f"{output} will not be what its name says, but {to}")
    if place.kind is places.CheckpointKind.MEGATRON:
        return to, _convert_megatron(place.path, output, to)
    from ..conversion import Conversion

    return to, Conversion(place, **given).write(output, to)


def _check_options(kind: Any, to: str, given: dict[str, Any]) -> None:
    """Refuses options that say nothing about a conversion from ``kind`` into the format ``to``."""
    is_megatron = kind is CheckpointKind.MEGATRON
    if is_megatron and to not in _MEGATRON:
        raise InvalidArgument(f"a checkpoint of Megatron can be converted to {' or '.join(_MEGATRON)}, not to {to}")
    is_checked = is_megatron or kind is CheckpointKind.DISTRIBUTED
    unfit = {
        "--only is not for a checkpoint of Megatron: convert all of it": is_megatron and given["only"] is not None,
        "--rank is for a checkpointer's folder": kind is not CheckpointKind.CHECKPOINT and given["rank"] is not None,
        "--step is for --to checkpoint": to != "checkpoint" and given["step"] is not None,
        "--drop-objects is for --to safetensors": to != "safetensors" and given["drop"],
        "--unverified is not for what is compared with its checksums in any case": is_checked and not given["verify"],
    }
    for message in filter(unfit.get, unfit):
        raise InvalidArgument(message)


def _convert_to_store(source: str, output: ObjectPlace, to: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Converts ``source`` in a temporary folder, and copies the result to a store."""
    with scratch_folder(output, file=to in _FILES) as folder:
        written = folder / "converted" / (output.name or "checkpoint")
        written.parent.mkdir()
        done = _convert(source, written, to, given)
        copying.copy(places.find(str(written)), output, verify=False)
        return done


def _convert_megatron(folder: Path, output: Path, to: str) -> dict[str, Any]:
    """Converts a checkpoint of Megatron, whose layout ``tensorferry.megatron`` knows."""
    try:
        from ...megatron import convert as megatron
        from ...megatron.release import CheckpointingException
    except ImportError as e:
        raise InvalidArgument(f"{folder} is a checkpoint of Megatron, and its converter needs more: {e}") from e
    try:
        done = megatron.convert(folder, output, to=_MEGATRON[to])
    except CheckpointingException as e:
        if isinstance(e.__cause__, TensorferryError):
            raise e.__cause__ from None
        raise ProtocolError(str(e)) from e
    return {"tensors": done.tensors, "objects": done.objects, "bytes": done.bytes}
