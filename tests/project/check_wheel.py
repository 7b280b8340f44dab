"""Checks the one wheel in a folder: it is an abi3 wheel, which with a free-threaded Python first on PATH it silently is
not, it is for the processor that it says, it needs no newer glibc than it says, and it lists what it was built from."""

import re
import sys
import zipfile
from pathlib import Path

_TAGGED = re.compile(r"tensorferry-[\d.]+-cp311-abi3-(?:manylinux_(\d+)_(\d+)|linux)_(x86_64|aarch64)\.whl")
#: What ``e_machine`` in the header of a shared library is on each platform, little-endian at byte 18.
_MACHINES = {"x86_64": 62, "aarch64": 183}


def needed_glibc(library: bytes) -> tuple[int, int]:
    """Returns the newest version of glibc whose symbols a shared library names; (0, 0) if it names none."""
    named = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)]
    return max(named, default=(0, 0))


def main(folder: str, glibc: str | None = None) -> None:
    """Exits with a message unless ``folder`` holds exactly one wheel, tagged for the stable ABI of Python 3.11.

    Args:
        folder: the folder
        glibc: the version that its tag must name, as in ``manylinux_2_28``: ``2_28``
    """
    wheels = sorted(Path(folder).glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"expected one wheel in {folder}, found {[p.name for p in wheels]}")
    name = wheels[0].name
    tagged = _TAGGED.fullmatch(name)
    if not tagged:
        sys.exit(f"{name} is not tagged cp311-abi3")
    with zipfile.ZipFile(wheels[0]) as wheel:
        libraries = [entry for entry in wheel.namelist() if entry.endswith(".so")]
        needed = max(needed_glibc(wheel.read(entry)) for entry in libraries)
        machines = {int.from_bytes(wheel.read(entry)[18:20], "little") for entry in libraries}
        boms = [entry for entry in wheel.namelist() if entry.endswith(".cyclonedx.json")]
    if tagged[1] and needed > (int(tagged[1]), int(tagged[2])):
        sys.exit(f"{name} needs glibc {needed[0]}.{needed[1]}")
    if glibc and (tagged[1], tagged[2]) != tuple(glibc.split("_")):
        sys.exit(f"{name} is not tagged manylinux_{glibc}")
    if machines != {_MACHINES[tagged[3]]}:
        sys.exit(f"{name} holds a library for another processor than its tag says")
    if not boms:
        sys.exit(f"{name} has no bill of materials (SBOM) of the crates in it")
    size = wheels[0].stat().st_size / 1e6
    print(f"{name}: {size:.1f} MB, abi3, needs glibc {needed[0]}.{needed[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
