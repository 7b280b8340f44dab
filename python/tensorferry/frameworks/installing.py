"""Puts tensorferry's classes in the place of those that frameworks name, for as long as the user wants."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import multiprocessing.context
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat

from .. import _validate
from .._reentry import CallLock
from ..dcp.file_reader import FileReader
from ..dcp.file_writer import FileWriter
from ..pickles.allowlist import Allowed
from ..storage.objects import client
from ..storage.places import is_store_url
from ..torchft.transport import HTTPTransport

logger = logging.getLogger("tensorferry")

#: Where frameworks, and torch itself for a ``checkpoint_id``, look up torch's classes. Not the module that defines
#: them: classes that are derived from them there stay torch's.
_STORAGE = (
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint._storage_utils",
    "torch.distributed.checkpoint.format_utils",
)
_TRANSPORT = ("torchft.checkpointing", "torchft.manager")
_SPAWNED = (multiprocessing.context.SpawnProcess, multiprocessing.context.ForkServerProcess)

#: The installations that have not been undone, of all threads, and what guards them. The first one has done the work.
_current: list[Installation] = []
_lock = CallLock("install() or undo()", fork_safe=True)


class _StandIn:
    """Stands for one of torch's storage classes: calls make tensorferry's, everything else is torch's.

    It is no class, so that a class derived from it (``__mro_entries__``) is derived from torch's.
    """

    def __init__(self, theirs: Any, ours: type, make: Callable[..., Any]) -> None:
        self._theirs, self._ours, self._make = theirs, ours, make
        self.__signature__ = inspect.signature(theirs)

    def validate_checkpoint_id(self, checkpoint_id: Any) -> bool:
        """Whether torch is to take this class for a ``checkpoint_id``: as torch says, and for URLs of object stores.

        Without the package that makes requests to stores, URLs go where torch sends them.
        """
        if is_store_url(checkpoint_id) and client.is_installed():
            return True
        return bool(self._theirs.validate_checkpoint_id(checkpoint_id))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes an object of tensorferry's class, or of torch's if the arguments ask for what only that can do."""
        return self._make(*args, **kwargs)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        del bases
        return (self._theirs,)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, (self._theirs, self._ours))

    def __subclasscheck__(self, subclass: Any) -> bool:
        return issubclass(subclass, (self._theirs, self._ours))

    def __or__(self, other: Any) -> Any:
        return self._theirs | other

    def __ror__(self, other: Any) -> Any:
        return other | self._theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def __reduce__(self) -> Any:
        return _torchs, (self._theirs,)


def _torchs(theirs: type) -> type:
    """Unpickles a :class:`_StandIn` as the class that it stands for."""
    return theirs


def _writer_maker(safe_globals: tuple[Any, ...], trust_pickle: bool) -> Callable[..., Any]:
    """Returns a function that makes a ``FileWriter`` from the arguments of torch's ``FileSystemWriter``, if it can."""

    def make_writer(*args: Any, **kwargs: Any) -> Any:
        asked = inspect.signature(FileSystemWriter).bind(*args, **kwargs).arguments
        format_ = asked.get("serialization_format", SerializationFormat.TORCH_SAVE)
        if asked.get("_extensions") or format_ != SerializationFormat.TORCH_SAVE:
            logger.warning("torch's FileSystemWriter is used: tensorferry's has no extensions and no other format")
            return FileSystemWriter(*args, **kwargs)
        overwrite = asked.get("overwrite", True)
        return FileWriter(asked["path"], overwrite=overwrite, safe_globals=safe_globals, trust_pickle=trust_pickle)

    return make_writer


def _reader_maker(safe_globals: tuple[Any, ...], trust_pickle: bool) -> Callable[..., Any]:
    """Returns a function that makes a ``FileReader`` from the arguments of torch's ``FileSystemReader``, if it can."""

    def make_reader(*args: Any, **kwargs: Any) -> Any:
        asked = inspect.signature(FileSystemReader).bind(*args, **kwargs).arguments
        if asked.get("_extension_registry") is not None:
            logger.warning("torch's FileSystemReader is used: tensorferry's has no extensions")
            return FileSystemReader(*args, **kwargs)
        return FileReader(asked["path"], safe_globals=safe_globals, trust_pickle=trust_pickle)

    return make_reader


class Installation:
    """What :func:`install` has replaced; as a context manager it is undone at the end of the block."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Ends this installation. Does nothing the second time.

        When the last one of the process has ended, everything is put back as it was, except what somebody else has
        replaced meanwhile; that is logged.

        Raises:
            InvalidArgument: this thread is in the middle of :func:`install` or of this method
        """
        with _lock.held():
            if self not in _current:
                return
            _current.remove(self)
            if _current:
                _current[0]._replaced += self._replaced
                self._replaced = []
                return
            self._put_back()
            logger.info("tensorferry.install is undone")

    def _put_back(self) -> None:
        for owner, name, before, ours in reversed(self._replaced):
            if inspect.getattr_static(owner, name) is ours:
                setattr(owner, name, before)
            else:
                logger.warning("%s.%s stays as it is: somebody else has replaced it", owner, name)
        self._replaced = []

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, inspect.getattr_static(owner, name), value))
        setattr(owner, name, value)


def install(
    *, files: bool = True, transport: bool = True, safe_globals: Iterable[Any] = (), trust_pickle: bool = False
) -> Installation:
    """Puts tensorferry's classes in the place of torch's and torchft's, where frameworks look those up.

    From now on ``torch.distributed.checkpoint.FileSystemWriter`` and ``FileSystemReader`` make a ``FileWriter`` and a
    ``FileReader``, a ``checkpoint_id`` that is a folder is saved and loaded with them, and torchft's ``Manager`` builds
    a ``tensorferry.HTTPTransport``. URLs of places in object stores go the same way, if the extra ``objects``
    is installed; without it, torch goes on to take them to fsspec. What is replaced is logged. Processes that this one
    spawns get the same. Names that a module has imported before keep their meaning, with a warning that names the
    module, and classes derived from torch's stay torch's.

    Args:
        files: replace torch's storage classes
        transport: replace torchft's transport, if torchft is installed
        safe_globals: classes and functions that pickled objects in checkpoints may name besides the default list
        trust_pickle: let pickled objects in checkpoints name anything

    Returns:
        The installation: ``undo()`` ends it, and so does the end of a ``with`` block. One that is made while another
        one is in force, in any thread, changes nothing, and holds what is there until it is undone, too.

    Raises:
        InvalidArgument: an argument cannot be used; the message names it. Or this thread is in the middle of another
            ``install`` or of an ``undo()``
        ImportError: torchft is installed and cannot be imported; nothing is replaced then
    """
    _validate.boolean("files", files)
    _validate.boolean("transport", transport)
    listed = tuple(_validate.items("safe_globals", safe_globals))
    Allowed(listed, trust_pickle)
    options = {"files": files, "transport": transport, "safe_globals": listed, "trust_pickle": trust_pickle}
    made = Installation()
    with _lock.held():
        if _current:
            logger.info("tensorferry.install: something is installed already, and stays as it is")
        else:
            try:
                _put_in_place(made, options)
            except BaseException:
                made._put_back()
                raise
        _current.append(made)
    return made


def _put_in_place(made: Installation, options: dict[str, Any]) -> None:
    """Replaces the classes that ``options`` name in the modules of torch and torchft, and in spawned children."""
    if options["files"]:
        trusted = options["safe_globals"], options["trust_pickle"]
        writer = _StandIn(FileSystemWriter, FileWriter, _writer_maker(*trusted))
        reader = _StandIn(FileSystemReader, FileReader, _reader_maker(*trusted))
        for name in _STORAGE:
            module = importlib.import_module(name)
            for attribute, stand_in in (("FileSystemWriter", writer), ("FileSystemReader", reader)):
                if hasattr(module, attribute):
                    made._replace(module, attribute, stand_in)
                    logger.info("%s.%s is replaced by tensorferry's", name, attribute)
        _warn_of_copies("torch.", FileSystemWriter, FileSystemReader)
    if options["transport"] and importlib.util.find_spec("torchft") is not None:
        modules = [importlib.import_module(name) for name in _TRANSPORT]
        theirs = modules[0].HTTPTransport
        for module in modules:
            made._replace(module, "HTTPTransport", HTTPTransport)
            logger.info("%s.HTTPTransport is replaced by tensorferry's", module.__name__)
        _warn_of_copies("torchft.", theirs)
    for process in _SPAWNED:
        made._replace(process, "_Popen", staticmethod(_installing_in_child(process._Popen, options)))


def _warn_of_copies(package: str, *classes: type) -> None:
    """Warns of modules outside of ``package`` that have imported one of ``classes`` by its name before."""
    for name, module in list(sys.modules.items()):
        if name.startswith((package, "tensorferry.")) or module is None:
            continue
        names = getattr(module, "__dict__", {})
        for cls in classes:
            if names.get(cls.__name__) is cls:
                logger.warning(
                    "%s has imported %s before tensorferry.install() and keeps it: call install() before that import",
                    name,
                    cls.__name__,
                )


def _installing_in_child(popen: Callable[[Any], Any], options: dict[str, Any]) -> Callable[[Any], Any]:
    """Returns a function that starts a process as ``popen`` does, whose child calls :func:`install` with ``options``.

    The process gets an attribute that does so when the child unpickles it.
    """

    def start(process: Any) -> Any:
        process._tensorferry = _InChild(options)
        try:
            return popen(process)
        finally:
            del process._tensorferry

    return start


class _InChild:
    """Unpickling it calls :func:`install`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def __reduce__(self) -> Any:
        return _install_with, (self._options,)


def _install_with(options: dict[str, Any]) -> None:
    install(**options)
