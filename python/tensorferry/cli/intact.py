"""Files that are what they should be: those that an index names, and those that match their checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._native import _file_damage
from ..errors import CorruptCheckpoint, IncompleteCheckpoint, ProtocolError, TensorferryError
from ..storage.folder import Index, missing_files, read_index
from ..storage.places import AnyPlace
from . import distributed


def files_of_ranks(folder: Any) -> tuple[Index, list[Any]]:
    """Returns the index in a checkpointer's folder, and the file of each rank.

    Raises:
        IncompleteCheckpoint: there is no index, or a file is missing
        CorruptCheckpoint: a file is another one than the index names
        TensorferryError: the index or a file cannot be read
    """
    index = read_index(folder)
    if missing := missing_files(folder, index):
        raise IncompleteCheckpoint(f"{folder} is incomplete: {', '.join(missing)} is missing")
    names = [index.files[rank][0] for rank in range(index.world_size)]
    return index, [folder / name for name in distributed.checked_files(folder, names, index.commit)]


def require_undamaged(path: Path, *, archive: bool = False, name: AnyPlace | None = None) -> Path:
    """Returns ``path``, after comparing the file with its checksums, if it has some.

    Args:
        path: the file
        archive: it is a ``torch.save`` file, and no container
        name: what messages call it, if it is a copy

    Raises:
        CorruptCheckpoint: it does not match them
        TensorferryError: it cannot be read
    """
    if archive:
        check_archive(path, name)
    elif damaged := _file_damage(path):
        raise CorruptCheckpoint(f"{name or path} is damaged at {len(damaged)} places: see tensorferry verify")
    return path


def check_archive(path: Path, name: AnyPlace | None = None) -> bool:
    """Compares the records of an archive of ``torch.save`` with their CRC-32.

    Returns:
        Whether they have any. ``torch.save`` leaves them out after ``torch.serialization.set_crc32_options(False)``.

    Raises:
        CorruptCheckpoint: one does not match, or the archive cannot be read or ends before its records do
        ProtocolError: ``torch.save`` has not written the archive, or another program has compressed it
    """
    import zipfile
    import zlib

    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            names = {record.filename.partition("/")[2] for record in records}
            if "data.pkl" not in names or "constants.pkl" in names:
                raise ProtocolError(
                    f"{name or path} is an archive of another program than torch.save: TorchScript, NumPy or others"
                )
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise ProtocolError(f"{name or path} is compressed, which torch.save never does: unpack it")
            if sum(record.file_size for record in records) > path.stat().st_size:
                raise CorruptCheckpoint(
                    f"{name or path} is damaged: its records are longer than the file, which torch.save never writes"
                )
            if records and not any(record.CRC for record in records):
                return False
            bad = archive.testzip()
    except TensorferryError:
        raise
    except EOFError as e:  # It says nothing itself.
        raise CorruptCheckpoint(f"{name or path} is damaged: it was cut off, and ends before its records do") from e
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, NotImplementedError, RuntimeError) as e:
        raise CorruptCheckpoint(f"{name or path} is damaged: {e}") from e
    if bad is not None:
        raise CorruptCheckpoint(f"{name or path} is damaged: record {bad} does not match its CRC-32")
    return True
