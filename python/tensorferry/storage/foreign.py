"""Files of other programs: how they are told apart, and why some of them are refused."""

from __future__ import annotations

import contextlib
import json

from .._native import Stored
from ..errors import ProtocolError, SystemRefused, TensorferryError
from .objects.place import ObjectPlace
from .places import AnyPlace
from .whole_files import is_file, listed

#: The index that Hugging Face's programs, and torch's, write beside a model in several safetensors files.
MODEL_INDEX = "model.safetensors.index.json"
#: How much of a file tells what it is.
HEAD = 64
#: How an archive begins, and what torch wrote before release 1.6.
_ARCHIVE, _OLD_TORCH = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
#: The longest header of a safetensors file.
_LONGEST_HEADER = 100_000_000
#: The key of `__metadata__` under which torch's HuggingFaceStorageWriter says which parts of tensors a file has.
_PARTS = "DCP_SHARDING_INFO"
#: Why such a file is refused, and what reads it.
_ARE_PARTS = (
    "torch's HuggingFaceStorageWriter(save_distributed=True) wrote it, so its tensors may be parts of larger ones, and "
    "nothing says how many files there are: load the folder with torch's HuggingFaceStorageReader, or save with "
    "enable_consolidation=True, which writes whole tensors as well"
)


def is_archive(path: AnyPlace, head: bytes | None = None) -> bool:
    """Whether a file is an archive, as ``torch.save`` writes them, and not a safetensors file.

    Args:
        path: the file
        head: its first :data:`HEAD` bytes, if they were read

    Raises:
        ProtocolError: it is neither; the message says what it is
        SystemRefused: it cannot be read
        TensorferryError: the store does not answer, or refuses
    """
    head = _head_of(path) if head is None else head
    if head.startswith(_ARCHIVE):
        return True
    if (what := _unlike_a_container(head)) is not None:
        raise ProtocolError(f"{path} is neither a safetensors nor a torch.save file: {what}")
    return False


def _head_of(path: AnyPlace) -> bytes:
    if isinstance(path, ObjectPlace):
        return path.opened().head(HEAD)
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError as e:
        raise SystemRefused(e.errno, f"{path}: cannot be read: {e.strerror}") from e


def _unlike_a_container(head: bytes) -> str | None:
    """Returns what is wrong with the first bytes of a file that should be a safetensors file."""
    if not head:
        return "it is empty"
    if head.startswith(_OLD_TORCH):
        return "torch saved it in the format that it had before release 1.6: load it with torch, and save it again"
    length = int.from_bytes(head[:8], "little")
    if len(head) > 8 and (length > _LONGEST_HEADER or head[8:9] != b"{"):
        return "it is text" if _is_text(head) else f"it begins with the bytes {head[:8].hex(' ')}"
    return None


def _is_text(head: bytes) -> bool:
    return all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head)


def refuse_parts(path: AnyPlace, stored: Stored) -> None:
    """Refuses a safetensors file whose tensors may be parts of tensors.

    Of whole ones torch says the same as of first parts, but writes an index beside their files.

    Raises:
        ProtocolError: it is one
    """
    text = dict(stored.about).get(_PARTS)
    if text is None:
        return
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_at_start = not any(any(one["saved_offsets"]) for one in json.loads(text).values())
        if is_at_start and is_file(path.parent / MODEL_INDEX):
            return
    raise ProtocolError(f"{path}: {_ARE_PARTS}")


def refuse_folder_of_parts(folder: AnyPlace) -> None:
    """Refuses a folder without an index if its first safetensors file has parts of tensors.

    Raises:
        ProtocolError: it is such a folder
        TensorferryError: it cannot be listed
    """
    first = min((name for name in listed(folder) if name.endswith(".safetensors")), default=None)
    if first is None:
        return
    try:
        about = Stored.open(folder / first, checksums=False).about
    except TensorferryError:
        return
    if _PARTS in dict(about):
        raise ProtocolError(f"{folder}: {_ARE_PARTS}")
