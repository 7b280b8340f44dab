"""The formats that the suffix of a file promises."""

from __future__ import annotations

from pathlib import Path

from . import console

#: What programs expect in a file with this suffix.
_PROMISED = {
    ".safetensors": "safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch.save"),
    **dict.fromkeys((".npy", ".npz"), "numpy"),
    **dict.fromkeys((".pkl", ".pickle"), "pickle"),
    ".gguf": "GGUF",
    ".onnx": "ONNX",
    **dict.fromkeys((".h5", ".hdf5"), "HDF5"),
    ".zip": "zip",
    **dict.fromkeys((".txt", ".md", ".json", ".yaml", ".yml", ".csv"), "text"),
}


def warn(path: Path, written: str, remedy: str) -> None:
    """Says so if the name of a file promises another format than ``written``, one of those above.

    Args:
        path: the file
        written: what will be in it
        remedy: what gets the promised format
    """
    promised = _PROMISED.get(path.suffix.lower())
    if promised is not None and promised != written:
        console.note(
            f"tensorferry: warning: {path} will be a {written} file, although its name promises {promised}: name it "
            f"otherwise, or {remedy}"
        )
