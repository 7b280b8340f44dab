"""The command ``tensorferry``: serves, pulls, shows, compares, verifies and converts checkpoints.

Each verb has a file of its own in ``verbs/``; ``app.py`` lists them. No verb imports torch unless it has to. The
packages that the command line needs come with ``pip install 'tensorferry[cli]'``; the keeper needs none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

#: The packages of the extra ``cli``.
_PACKAGES = ("cyclopts", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: of the command line; ``sys.argv`` if left out

    Returns:
        The exit status: 0; 1 if the answer of ``diff`` and its like is no; 2 for wrong usage or a missing
        package; otherwise that of the error, see ``exits.py``.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    if given[:1] == ["keeper"]:
        from ..checkpointing.keeper import command

        return command.main(given[1:])
    try:
        import rich  # noqa: F401 - it is used only where something is drawn

        from . import app
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] not in _PACKAGES:
            raise
        print(
            f"tensorferry: the command line needs the package {e.name}: pip install 'tensorferry[cli]'", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        # Most of a short run is these imports.
        print("tensorferry: interrupted: ended by Ctrl-C", file=sys.stderr)
        return 130
    return app.run(given)
