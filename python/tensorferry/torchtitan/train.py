"""torchtitan's command after ``tensorferry.install()``: ``torchrun ... -m tensorferry.torchtitan.train ...``.

For its fault-tolerant trainer, which applies no overrides.
"""

from __future__ import annotations

from torchtitan import train

from ..frameworks.installing import install


def main() -> None:
    """Installs tensorferry's classes in this process, and runs ``torchtitan.train`` with the same arguments."""
    install()
    train.main()


if __name__ == "__main__":
    main()
