"""``tensorferry convert``: turns a checkpoint of one format into one of another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from ...errors import InvalidArgument, ProtocolError, TensorferryError
from ...storage.objects.place import ObjectPlace
from ...storage.places import AnyPlace, any_place, is_store_url
from .. import exits
from ..flags import Json, Switch
from ..output import console, suffixes

#: What can be written.
Format = Literal["tensorferry", "safetensors", "torch", "checkpoint", "dcp", "torch-dcp"]
#: The format that a suffix stands for.
_SUFFIXES: dict[str, Format] = {".safetensors": "tensorferry", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
#: How many names a warning has.
_NAMED = 3
#: What is in the file of a format that is one file.
_WRITTEN = {"tensorferry": "safetensors", "safetensors": "safetensors", "torch": "torch.save"}
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
    drop_objects: Switch = False,
    unverified: Switch = False,
    json: Json = False,
) -> int:
    """Converts a checkpoint. The tensors pass through the page cache: a state of any size can be converted.

    Formats: tensorferry (one file of a state, with checksums; the default for .safetensors), safetensors (only tensors,
    for other programs), torch (torch.save; the default for .pt, .pth and .bin), checkpoint (a folder for
    AsyncCheckpointer.load), dcp (a folder for FileReader), torch-dcp (a folder for torch's FileSystemReader, and so for
    tools such as torch's format_utils and accelerate merge-weights). The output appears when it is complete.

    Of a checkpointer's folder that several ranks saved, tensors that are spread over the ranks (FSDP2, DTensor) become
    whole, in memory. All other values are those of one rank, and for keys that it lacks, of the first that has them.

    Args:
        source: a safetensors or torch.save file, a curled container, or a folder of a checkpoint; one of Megatron is
            converted by tensorferry.megatron, to dcp or torch-dcp
        output: a file or folder that does not exist, or the URL of a place in an object store where nothing is
        to: the format
        only: convert what lies below this key alone, such as model, or state.model; its keys lose that prefix, so that
            load_state_dict takes them
        rank: of a checkpointer's folder that several ranks saved, the rank whose values are taken where they are not
            spread over the ranks (default: 0)
        step: with --to checkpoint, its step number (default: that of the source)
        drop_objects: with --to safetensors, leave out what that cannot hold, instead of refusing it
        unverified: do not compare the source with its checksums first
        json: print the result as one JSON document
    """
    from .. import places

    target = any_place(output, "output") if is_store_url(output) else Path(output)
    # Once only: a conversion may take long, and what it was to convert has gone.
    format_, told = places.settled(
        lambda: _converted(source, target, to, only, rank, step, drop_objects=drop_objects, verify=not unverified),
        source,
        attempts=1,
    )
    if json:
        console.out_json({"output": str(output), "format": format_, **told})
    else:
        others = "" if told.get("dropped") else f" and {told['objects']} other leaves"
        console.out(f"{output}: {told['tensors']} tensors{others}, as {format_}")
    if dropped := told.get("dropped"):
        console.note(
            f"tensorferry: warning: {len(dropped)} leaves are not tensors, and were left out: {_first_names(dropped)}"
        )
    if told.get("ranks"):
        console.note(
            f"tensorferry: tensors that are spread over the {told['ranks']} ranks are whole in the output; all other "
            f"values are those of rank {told['rank']} (--rank takes another one), and of the first rank that has them "
            "where that one has none"
        )
    if texts := told.get("numbers"):
        console.note(
            f"tensorferry: warning: a distributed checkpoint has all keys as text, so keys that were numbers are text "
            f"in the output: those of {_first_names(texts)}"
        )
    return exits.OK


def _converted(
    source: str,
    output: AnyPlace,
    to: str | None,
    only: str | None,
    rank: int | None,
    step: int | None,
    *,
    drop_objects: bool,
    verify: bool,
) -> tuple[str, dict[str, Any]]:
    """Converts ``source``; returns the format, and how much there was."""
    from .. import copying, places

    place = places.find(source)
    to = to or _SUFFIXES.get(output.suffix)
    if to is None:
        raise InvalidArgument(f"{output} does not say what to write: name a format with --to")
    if place.kind is places.CheckpointKind.PEERS:
        raise InvalidArgument("pull first, then convert: a running peer may change its state meanwhile")
    given = {"--only": only, "--rank": rank, "--step": step, "--drop-objects": drop_objects, "--unverified": not verify}
    _check_options(place.kind, to, {name for name, value in given.items() if value is not None and value is not False})
    if isinstance(output, ObjectPlace):
        return _to_store(place, output, to, only, rank, step, drop_objects=drop_objects, verify=verify)
    if isinstance(place.path, ObjectPlace):
        with copying.local(place, verify=verify) as here:
            return _converted(here.text, output, to, only, rank, step, drop_objects=drop_objects, verify=verify)
    if to in _WRITTEN and not os.path.lexists(output):
        suffixes.warn(output, _WRITTEN[to], "choose another format with --to")
    if place.kind is places.CheckpointKind.MEGATRON:
        return to, _megatron(place.path, output, to)
    from ..conversion import Conversion

    return to, Conversion(place, rank or 0, step, verify=verify, drop_objects=drop_objects, only=only).write(output, to)


def _check_options(kind: Any, to: str, given: set[str]) -> None:
    """Refuses options that say nothing about a conversion from ``kind`` into the format ``to``."""
    from ..places import CheckpointKind

    is_megatron = kind is CheckpointKind.MEGATRON
    if is_megatron and to not in _MEGATRON:
        raise InvalidArgument(f"a checkpoint of Megatron can be converted to {' or '.join(_MEGATRON)}, not to {to}")
    unfit = {
        "--only": "is not for a checkpoint of Megatron: convert all of it" if is_megatron else None,
        "--rank": "is for a checkpointer's folder" if kind is not CheckpointKind.CHECKPOINT else None,
        "--step": "is for --to checkpoint" if to != "checkpoint" else None,
        "--drop-objects": "is for --to safetensors" if to != "safetensors" else None,
        "--unverified": "is not for what is compared with its checksums while it is read, as this is"
        if is_megatron or kind is CheckpointKind.DISTRIBUTED
        else None,
    }
    for name in sorted(given):
        if (why := unfit[name]) is not None:
            raise InvalidArgument(f"{name} {why}")


def _to_store(
    place: Any, output: ObjectPlace, to: str, only: str | None, rank: int | None, step: int | None, **how: bool
) -> tuple[str, dict[str, Any]]:
    """Converts ``place`` in a temporary folder, and copies the result to a store."""
    from ...storage.copies import scratch_folder
    from .. import copying, places

    with scratch_folder(output, file=to in _WRITTEN) as folder:
        written = folder / "converted" / (output.name or "checkpoint")
        written.parent.mkdir()
        format_, told = _converted(place.text, written, to, only, rank, step, **how)
        copying.copy(places.find(str(written)), output, verify=False)
        return format_, told


def _first_names(names: list[str]) -> str:
    """Returns the first of some names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more (all are in the output of --json)" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _megatron(folder: Path, output: Path, to: str) -> dict[str, Any]:
    """Converts a checkpoint of Megatron with the converter that knows its layout."""
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
