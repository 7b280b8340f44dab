"""Checks that the one wheel in a folder is an abi3 wheel: with a free-threaded Python first on PATH it silently is
not."""

import re
import sys
from pathlib import Path


def main(folder: str) -> None:
    """Exits with a message unless ``folder`` holds exactly one wheel, tagged for the stable ABI of Python 3.11."""
    wheels = sorted(p.name for p in Path(folder).glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"expected one wheel in {folder}, found {wheels}")
    if not re.fullmatch(r"tensorferry-[\d.]+-cp311-abi3-(manylinux|linux)\w*\.whl", wheels[0]):
        sys.exit(f"{wheels[0]} is not tagged cp311-abi3")
    print(f"{wheels[0]}: abi3")


if __name__ == "__main__":
    main(sys.argv[1])
