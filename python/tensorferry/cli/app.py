"""The application: its verbs, and how an error ends it.

To add a verb, write ``verbs/<verb>.py`` with a function of the same name, whose docstring is its help, and add it to
:data:`VERBS`. A verb imports torch, and what needs it, inside its functions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any
from warnings import filterwarnings

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError

from .._settings import TRACEBACK, setting
from ..errors import SystemRefused, TensorferryError, message_of
from . import console, exits

#: The verbs, with what the help says of them.
VERBS = {
    "serve": "Publishes a checkpoint until it is interrupted, and prints METADATA for receivers.",
    "pull": "Fetches what running transports serve, verified, into a file or a folder.",
    "inspect": "Shows what a checkpoint holds, or which checkpoints a folder holds.",
    "verify": "Compares every byte of a checkpoint with its checksums.",
    "diff": "Shows which leaves of two checkpoints differ.",
    "convert": "Turns a checkpoint of one format into one of another.",
    "copy": "Copies a checkpoint between a folder and an object store.",
    "doctor": "Says which address a transport here would use, and how fast a peer sends.",
    "bench": "Measures receives on this machine.",
    "top": "Shows a fleet: who serves, who heals, how fast.",
    "keeper": "Holds the snapshots of this node's trainers in memory.",
}

#: It has a parser of its own, to which ``main`` gives its arguments.
_KEEPER = "tensorferry.checkpointing.keeper.command:main"
_HELP = """Moves, shows, compares, verifies and converts checkpoints of tensorferry, safetensors and torch.

METADATA is the string that metadata() of a running transport returns, or that `tensorferry serve` prints."""


def installed_version() -> str:
    """Returns the version of the package."""
    from importlib.metadata import version

    return version("tensorferry")


def application(verb: str | None = None) -> App:
    """Returns the application with one verb, or with all; a verb is imported when it runs."""
    app = App(
        name="tensorferry",
        help=_HELP,
        version=installed_version,
        version_flags=("--version", "-V"),
        help_format="markdown",
        default_parameter=Parameter(negative=()),
        result_action="return_value",
        print_error=False,
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
    )
    if verb in VERBS:
        app.command(f"{__package__}.verbs.{verb}:{verb}", name=verb)
        return app
    for name, text in VERBS.items():
        is_keeper = name == "keeper"
        app.command(_KEEPER if is_keeper else f"{__package__}.verbs.{name}:{name}", name=name, help=text)
    app.register_install_completion_command()
    return app


def run(arguments: Sequence[str]) -> int:
    """Runs the verb that ``arguments`` name; returns the exit status.

    An error becomes one line on standard error, with ``--json`` among the arguments as a JSON object; that the reader
    of standard output has gone is not told. Only the main thread may call it: it handles SIGTERM until it returns.
    """
    arguments = list(arguments)
    as_json = "--json" in arguments
    _prepare_streams()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, _terminate)
    logger, warnings = logging.getLogger("tensorferry"), _Warnings(logging.WARNING)
    logger.addHandler(warnings)
    try:
        status = application(next(iter(arguments), None))(arguments)
        sys.stdout.flush()
        return status if isinstance(status, int) else exits.OK
    except UnusedCliTokensError as e:
        extra = " ".join(e.unused_tokens or ())
        message = f"too many arguments: {extra}. See tensorferry {' '.join([*arguments[:1], '--help'])}"
        return _fail("usage", message, exits.USAGE, as_json)
    except CycloptsError as e:
        return _fail("usage", str(e), exits.USAGE, as_json)
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        if package in ("", __package__.partition(".")[0]):
            return _fail_with(e, as_json)
        message = f"{' '.join(arguments[:1])} of this needs the package {package}: pip install {package}"
        return _fail("InvalidArgument", message, exits.USAGE, as_json)
    except BrokenPipeError:
        _discard(sys.stdout)
        return exits.BROKEN_PIPE
    except exits.Terminated:
        return _fail("terminated", "ended by a signal", exits.TERMINATED, as_json)
    except KeyboardInterrupt:
        return _fail("interrupted", "ended by Ctrl-C", exits.INTERRUPTED, as_json)
    except TensorferryError as e:
        return _fail_with(e, as_json)
    except OSError as e:
        # A full disk, for example, to which standard output goes.
        try:
            sys.stdout.flush()
        except OSError:
            _discard(sys.stdout)
        return _fail_with(SystemRefused(e.errno, e.strerror or str(e), e.filename), as_json)
    except Exception as e:
        return _fail_with(e, as_json)
    finally:
        logger.removeHandler(warnings)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _discard(stream: Any) -> None:
    """Drops what is left in the buffer of a stream: it must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _prepare_streams() -> None:
    """Makes standard output and error fit to print to, whatever the process was started with.

    Python has ``None`` for one that was closed. Names can have characters that the locale's encoding lacks. That torch
    misses NumPy is of no concern here: no verb needs it.
    """
    filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the process's lifetime
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


class _Warnings(logging.Handler):
    """Prints the warnings of the package, each on one line."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a warning."""
        console.warn(record.getMessage())


def _fail_with(error: Exception, as_json: bool) -> int:
    if setting(TRACEBACK) == "1":
        with contextlib.suppress(OSError):
            traceback.print_exc()
    mistake = f"{error} (please report this; {TRACEBACK}=1 shows where)"
    what = message_of(error) if isinstance(error, TensorferryError) else mistake
    return _fail(type(error).__name__, what, exits.status_of(error), as_json)


def _fail(kind: str, message: str, status: int, as_json: bool) -> int:
    if as_json:
        console.note_json({"error": kind, "message": message, "status": status})
    else:
        console.note(f"tensorferry: {kind}: {message}")
    return status


def _terminate(*_: Any) -> None:
    raise exits.Terminated
