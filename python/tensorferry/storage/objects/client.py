"""The clients of object stores, one for each bucket and its options, and the thread in which their requests run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..._fork import ForkSafeLock
from ...errors import ForkedProcess, InvalidArgument, SystemRefused
from . import settings
from .answers import DEBUG
from .url import without_secrets

if TYPE_CHECKING:
    import asyncio

    from .loop import Loop

#: Seconds that one request may take, its body included, before it counts as stalled and is made again.
STALL_S = 60.0
#: Seconds that a store may take to accept a connection.
_CONNECT_S = 10.0
#: How often a request is made again, and the first and the longest pause before that, in seconds. A pause is any time
#: between the first one and so many times the one before. All of them together are half a minute; one time in 10,000,
#: four seconds. With 8 retries from 0.1 s on, four times as long each, that was one time in 20, and a store that asked
#: for patience that long ended the save.
_RETRIES, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, _TIMES = 9, 0.3, 10.0, 3
#: How many clients of one bucket are kept.
_KEPT = 8
#: Keys of ``store_options`` that are not those of a store.
_OF_CLIENT = frozenset({"client_options", "retry_config", "credential_provider"})
_MISSING = "checkpoints in object stores need the package obstore: pip install 'tensorferry[objects]'"
#: How the names of the variables begin that a client reads.
_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "SSL_CERT_")
#: Variables that name the address of a store that is not S3, by which a client tells whether it is encrypted.
_ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "GOOGLE_BASE_URL")

_lock = ForkSafeLock()
_clients: dict[tuple[Any, ...], Client] = {}
_loop: tuple[int, Loop] | None = None


def obstore() -> Any:
    """Returns the module ``obstore``.

    Raises:
        InvalidArgument: it is not installed
        SystemRefused: it cannot be loaded, for lack of memory
    """
    try:
        return importlib.import_module("obstore")
    except ModuleNotFoundError as e:
        raise InvalidArgument(_MISSING) from e
    except (ImportError, MemoryError) as e:
        raise SystemRefused(f"the package obstore cannot be loaded: {e}") from e


def is_installed() -> bool:
    """Whether ``obstore`` is installed."""
    return importlib.util.find_spec("obstore") is not None


def client_paths() -> list[str]:
    """Returns the folders in which another process finds ``obstore``; none without it."""
    found = importlib.util.find_spec("obstore")
    return [] if found is None or not found.origin else [os.path.dirname(os.path.dirname(found.origin))]


def options_of(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns the options of a store, checked and frozen.

    Raises:
        InvalidArgument: they are not a mapping with names as keys
    """
    if options is None:
        return MappingProxyType({})
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise InvalidArgument(f"store_options must be a dict of options of obstore, not a {type(options).__name__}")
    # The library takes options of a store in a dict of their own, too.
    within = options.get("config")
    options = {**within, **options} if isinstance(within, Mapping) else dict(options)
    if within is None or isinstance(within, Mapping):
        options.pop("config", None)
    return MappingProxyType(options)


class Client:
    """Makes requests to a bucket.

    Args:
        root: the URL of the bucket
        options: as for :func:`client_of`
        timeout: as for :func:`client_of`

    Attributes:
        store: obstore's store
        endpoint: the address of the server, for messages; empty where that is not known
    """

    def __init__(self, root: str, options: Mapping[str, Any], timeout: float) -> None:
        # Its options stay, so that no other object gets the id of one while this is kept.
        self._root, self._options = root, options
        if root.partition("://")[0] in settings.SCHEMES:
            known = settings.of_s3(options)
            region = known.get("region", "us-east-1")
            endpoint = known.get("endpoint", f"https://s3.{region}.amazonaws.com")
        else:
            endpoint = next(filter(None, _endpoints(options)), "")
        self.endpoint = without_secrets(endpoint).rstrip("/")
        self._timeout = timeout
        self.store = _make(root, options, timeout, _RETRIES)

    @cached_property
    def store_once(self) -> Any:
        """The same store, for requests that are not made again."""
        return _make(self._root, self._options, self._timeout, 0)


def client_of(root: str, options: Mapping[str, Any], timeout: float) -> Client:
    """Returns the client for a bucket.

    Args:
        root: the URL of the bucket
        options: those of obstore's store, with ``client_options``, ``retry_config`` and ``credential_provider`` for
            its further arguments
        timeout: seconds that a whole operation may take

    Raises:
        InvalidArgument: obstore is not installed, or does not take an option; or the environment has another endpoint,
            or an option that no request can have
        SystemRefused: obstore cannot be loaded, for lack of memory
    """
    environment = tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(_VARIABLES)))
    key = (os.getpid(), root, _frozen(options), timeout, environment)
    with _lock.held():
        # The one that was used last is the last one.
        _clients[key] = made = _clients.pop(key, None) or Client(root, options, timeout)
        for old in [old for old in _clients if old[:2] == key[:2]][:-_KEPT]:
            del _clients[old]
        return made


def _make(root: str, options: Mapping[str, Any], timeout: float, retries: int) -> Any:
    module = importlib.import_module(f"{obstore().__name__}.store")
    config = {name: value for name, value in options.items() if name not in _OF_CLIENT}
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=min(STALL_S, timeout)),
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout)),
    }
    if root.partition("://")[0] in settings.SCHEMES:
        config = settings.for_s3(config)
        known = settings.of_s3(config)
        endpoints = [known.get("endpoint", "")]
        if (bundle := settings.certificates()) is not None:
            client["root_certificate"] = bundle
        if "checksum" not in known:
            config["checksum_algorithm"] = "CRC64NVME"
            # The checksum is in a header that is signed. To sign the bytes as well takes SHA-256 of all of them, which
            # costs ten times as much as the rest of a request; under TLS nobody on the way can change them anyway.
            if not _is_plain(endpoints) and "unsigned_payload" not in known:
                config["unsigned_payload"] = True
    else:
        endpoints = _endpoints(config)
    if _is_plain(endpoints):
        # Whoever gives such an address has chosen it.
        client["allow_http"] = True
    client |= options.get("client_options") or {}
    retry = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=timeout),
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
            "base": _TIMES,
        },
    }
    if retries:
        retry |= options.get("retry_config") or {}
    more = {"credential_provider": options["credential_provider"]} if "credential_provider" in options else {}
    try:
        return module.from_url(root, client_options=client, retry_config=retry, **config, **more)
    except BaseException as e:
        # A panic of the library is none of Exception.
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise InvalidArgument(
            f"{root}: this store cannot be opened: {without_secrets(str(e)).partition(DEBUG)[0][:500]}"
        ) from None


def _endpoints(options: Mapping[str, Any]) -> list[str]:
    """Returns the addresses of a store that is not S3, as options and the environment name them; one may be empty."""
    named = [value for name, value in options.items() if "endpoint" in name.lower() or "base_url" in name.lower()]
    return [*(str(value) for value in named), *(os.environ.get(name, "") for name in _ENDPOINTS)]


def _is_plain(endpoints: list[str]) -> bool:
    """Whether requests go to an address without TLS."""
    return any(text.startswith("http://") for text in endpoints)


def _frozen(value: Any) -> Any:
    """Returns ``value`` as part of a key; an object that cannot be one counts as itself."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), _frozen(one)) for name, one in value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, str | int | float | bool | bytes | timedelta | type(None)):
        return repr(value)
    return f"{type(value).__qualname__} at {id(value)}"


def loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop in which requests run, in a thread of its own that is started on first use.

    Raises:
        ForkedProcess: requests were made before this process was forked
        SystemRefused: the system refuses a thread, or memory for it
    """
    # Slow to load, with all of TLS, for those who never come here.
    from .loop import new_loop

    global _loop
    with _lock.held():
        if _loop is not None and _loop[0] != os.getpid():
            raise ForkedProcess(
                "requests to object stores were made before fork(): the threads behind them do not exist in the child; "
                "start it with spawn or forkserver"
            )
        if _loop is None:
            try:
                running = new_loop()
                threading.Thread(target=running.run_forever, name="tensorferry-objects", daemon=True).start()
            except (RuntimeError, MemoryError, OSError) as e:
                raise SystemRefused(f"cannot start a thread for requests to object stores: {e}") from e
            _loop = os.getpid(), running
        return _loop[1]
