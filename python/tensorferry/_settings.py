"""The environment variables that tensorferry reads. No other module reads one that begins with ``TENSORFERRY_``.

A misspelt name would be ignored without a word, and with ``TENSORFERRY_SECRTE`` the job would run without a secret. So
the first reading warns about names that no setting has.
"""

from __future__ import annotations

import difflib
import logging
import os
import re

logger = logging.getLogger("tensorferry")

_PREFIX = "TENSORFERRY_"
SECRET = "TENSORFERRY_SECRET"
SECRET_FILE = "TENSORFERRY_SECRET_FILE"
TLS = "TENSORFERRY_TLS"
TLS_CERTIFICATE = "TENSORFERRY_TLS_CERTIFICATE"
TLS_KEY = "TENSORFERRY_TLS_KEY"
SAME_HOST = "TENSORFERRY_SAME_HOST"
RELAY = "TENSORFERRY_RELAY"
INTERFACE = "TENSORFERRY_INTERFACE"
ADVERTISE = "TENSORFERRY_ADVERTISE"
PORT = "TENSORFERRY_PORT"
METRICS_PORT = "TENSORFERRY_METRICS_PORT"
KEEPER_DIR = "TENSORFERRY_KEEPER_DIR"
TRACEBACK = "TENSORFERRY_TRACEBACK"
#: All settings, as docs/reference/api.md lists them.
SETTINGS = (
    SECRET,
    SECRET_FILE,
    TLS,
    TLS_CERTIFICATE,
    TLS_KEY,
    SAME_HOST,
    RELAY,
    INTERFACE,
    ADVERTISE,
    PORT,
    METRICS_PORT,
    KEEPER_DIR,
    TRACEBACK,
)

#: What the project's own tests and benchmarks read.
_OF_TESTS = ("TENSORFERRY_MEGATRON_RANKS", "TENSORFERRY_MEGATRON_RELEASES")
#: What Kubernetes sets in every container of a namespace with a service called tensorferry, or tensorferry-something.
_OF_KUBERNETES = re.compile(r".*_SERVICE_(HOST|PORT)(_.*)?|.*_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
#: A name that is less similar than this to every setting is not taken for one of them.
_SIMILAR = 0.6

#: Gives True to the first caller of ``next`` in this process, whichever thread that is.
_first = iter((True,))


def setting(name: str) -> str | None:
    """Returns the value of the setting ``name``, one of :data:`SETTINGS`; ``None`` if it is not set.

    The first call in a process warns about variables that look like settings and are none.
    """
    assert name in SETTINGS
    if next(_first, False):
        _warn_of_unknown()
    return os.environ.get(name)


def _warn_of_unknown() -> None:
    for name in sorted(os.environ):
        # Values stay out of the message: a misspelt secret is one.
        if name.upper().startswith(_PREFIX) and not _is_known(name):
            logger.warning(
                "the environment variable %r is ignored: tensorferry has no such setting%s", name, _hint(name)
            )


def _is_known(name: str) -> bool:
    return name in SETTINGS or name in _OF_TESTS or _OF_KUBERNETES.fullmatch(name) is not None


def _hint(name: str) -> str:
    # Without the prefix, which makes all names similar.
    short = {known.removeprefix(_PREFIX): known for known in SETTINGS}
    near = difflib.get_close_matches(name.upper().removeprefix(_PREFIX), short, 1, _SIMILAR)
    return f"; did you mean {short[near[0]]}?" if near else f"; its settings are {', '.join(SETTINGS)}"
