"""The drop-in for torchft's ``HTTPTransport``."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from .. import _validate
from .._native import ArenaPool, Remote, Report
from ..errors import InvalidArgument, TransportClosed, UnprovenSource
from ..memory.accelerator import ACCELERATOR
from ..memory.bounce import BounceBuffers
from ..memory.host_pool import HostMemory
from ..memory.staging import Stager
from ..net.metadata import encrypted, is_stock
from ..net.options import ServerOptions
from ..net.report import InPlace, in_place, log_receive
from ..net.serve import serve, withdraw
from ..state.allowlist import Allowed, refusal
from ..state.in_place import InPlaceTargets
from ..state.load import receive
from ..state.snapshot import SnapshotMode, StateSnapshot, snapshot_mode
from . import compat

if TYPE_CHECKING:
    from torchft.checkpointing.transport import CheckpointTransport
else:
    try:
        from torchft.checkpointing.transport import CheckpointTransport
    except ImportError:
        # Without torchft the class stands on its own; it has the same methods.
        T_co = TypeVar("T_co")

        class CheckpointTransport(Generic[T_co]):
            """Stands in for torchft's base class where torchft is not installed."""


__all__ = ["HTTPTransport"]

logger = logging.getLogger("tensorferry")

T = TypeVar("T")


class HTTPTransport(CheckpointTransport[T]):  # type: ignore[misc]  # torchft has no types
    """Streams training state to replicas that heal, and receives it from healthy ones.

    Takes the place of ``torchft.checkpointing.HTTPTransport``. It starts a server at once; nothing is served until
    ``send_checkpoint``.

    Args:
        timeout: how long a request waits for a checkpoint to be allowed, and how long ``disallow_checkpoint`` lets
            readers of borrowed memory finish before it cuts them off
        num_chunks: connections a receive uses; 0 chooses by the number of cores. A stock torchft receiver that heals
            from here must use the same number.
        state_dict: gives the live state; ``recv_checkpoint`` then writes into its tensors and returns them. A tensor is
            found by its path, so it has to be the state that the source sends: for torchft's Manager
            ``{"user": {"default": ...}}``. Tensors it does not have are received into fresh memory; the log says how
            many came in place. What is queued on the stream in use there and on the device's default stream comes
            before what is written to an accelerator, and when ``recv_checkpoint`` returns, all of that is done:
            whatever is queued next, on any stream, finds it.
        strict: with ``state_dict``, refuse a state of which not every tensor has its counterpart in the live one, or
            the other way round; nothing is overwritten then
        snapshot: ``"borrow"`` serves CPU tensors from where they are, ``"copy"`` takes a private copy in
            ``send_checkpoint``: for states that change while they are served, as BatchNorm's buffers do with torchft's
            sync quorum. Accelerator tensors are always copied.
        safe_globals: classes and functions a received pickle may name besides the default list
        trust_pickle: let a received pickle name anything; then whoever can answer as the source can run code here
        secret: what sources and receivers of this job share, 16 bytes or more. With it, who has the metadata can do
            nothing without it, and what a source says is only believed if it proves to know it, before anything is
            unpickled. Stock torchft peers cannot take part. By default what ``TENSORFERRY_SECRET`` or the file
            ``TENSORFERRY_SECRET_FILE`` holds; docs/security.md says what it protects against.
        tls: encrypt what others fetch from here over the network, and fetch from nobody who does not. The certificate
            is made for this transport and its fingerprint stands in the metadata; a receiver needs no setting to fetch
            from such a source, but without it takes plain ones, too. Stock torchft peers cannot take part. What
            processes of this machine share stays plain.
        same_host: move the bytes through shared memory instead of the network where source and receiver run on one
            machine, in one network namespace and under one user. Both sides must want it; ``None`` is what
            ``TENSORFERRY_SAME_HOST`` says (``0`` is no), by default yes.
        interface: listen only here: an interface's name, an address of this host, or a network (``10.0.0.0/8``) one of
            its addresses is in. By default what ``TENSORFERRY_INTERFACE`` says, or everywhere.
        advertise: the name or address peers use, or one of this host's interfaces or networks. By default what
            ``TENSORFERRY_ADVERTISE`` says; else the address listened on, the host's name if it leads to more than the
            loopback interface, or the address of the interface that leads out.
        max_bandwidth: bytes per second that all receivers together may take from here; ``None`` is no limit
        reuse_bytes: keep up to this many bytes of received memory, once all its tensors are gone, for the next receive:
            fresh memory costs page faults, which take longer than the bytes do. It is page-locked where there is an
            accelerator, so that what is received is copied there at full speed; forked children cannot read it then,
            and copies out of it with ``non_blocking=True`` have to be over before its tensors are let go of
        progress: called with the bytes that are here and the bytes there are, some times a second during a receive and
            once at its end; what it raises ends the receive

    Raises:
        SystemRefused: no port can be opened
        InvalidArgument: an argument cannot be used; it is named
    """

    def __init__(
        self,
        timeout: timedelta,
        num_chunks: int = 0,
        *,
        state_dict: Callable[[], T] | None = None,
        strict: bool = False,
        snapshot: SnapshotMode = "borrow",
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
        secret: str | bytes | None = None,
        tls: bool = False,
        same_host: bool | None = None,
        interface: str | None = None,
        advertise: str | None = None,
        max_bandwidth: int | None = None,
        reuse_bytes: int = 0,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        reuse_bytes = _validate.integer("reuse_bytes", reuse_bytes, 0)
        self._timeout = timeout
        self._num_chunks = _validate.integer("num_chunks", num_chunks, 0)
        self._state_dict = _validate.function("state_dict", state_dict)
        self._strict = _validate.boolean("strict", strict)
        if strict and state_dict is None:
            raise InvalidArgument("strict=True compares with the live state: pass state_dict=, which gives it")
        self._snapshot = snapshot_mode(snapshot)
        self._allowed = Allowed(safe_globals, trust_pickle)
        self._options = ServerOptions(
            secret=secret,
            tls=tls,
            same_host=same_host,
            interface=interface,
            advertise=advertise,
            max_bandwidth=max_bandwidth,
        )
        self._stager = Stager(ACCELERATOR)
        self._bounce = BounceBuffers(ACCELERATOR)
        self._sending = threading.Lock()
        self._warned: set[tuple[str, str]] = set()
        self._warned_of_misses = False
        self._is_closed = False
        self._pool = ArenaPool(reuse_bytes, HostMemory(ACCELERATOR).lend) if reuse_bytes else None
        self._progress = _validate.function("progress", progress)
        self._server, self._address = serve(timeout, self._options)
        self._checkpoint_lock = _Gate(self)

    def address(self) -> str:
        """The URL to which ``{step}.safetensors`` or, for stock peers, ``{step}/full`` is appended."""
        return self._address

    def metadata(self) -> str:
        """What a receiver needs to fetch from here.

        It holds a random part: without a shared secret, whoever has it can read the state.
        """
        return self._address

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Publishes ``state_dict`` as ``step`` and returns; receivers fetch it on their own.

        Accelerator tensors are copied to the host first, as they are with all that is queued on the stream in use here
        and on the device's default stream; receivers get what is copied while the rest is. When this returns, nothing
        of them is read any more.

        Args:
            dst_ranks: ignored, as in torchft: who has the metadata may fetch
            step: the step it is served as
            state_dict: any tree of tensors and picklable objects
            timeout: ignored: nothing here waits for a receiver

        The memory that the tensors have now is what is served: one that is given other memory later (``p.data = x``,
        ``module.half()``) does not change that. Only what frees or moves a storage itself must wait until
        ``disallow_checkpoint`` has returned, or be kept off with ``snapshot="copy"``: ``storage.resize_()``, as FSDP1
        does it, ``tensor.resize_()`` to more, and ``share_memory_()``.

        Raises:
            UnsupportedLeaf: a leaf cannot be carried; its path is named, and what was served before is still served
            InvalidArgument: the step is no whole number of 64 bits, or a graph is being captured on the stream in use
                and the state is on an accelerator
            TransportClosed: after :meth:`shutdown`
            Exception: whatever torch raises when a copy off the accelerator fails; then nothing is served any more, and
                receivers that have begun get an error at once, those to which no byte came included
        """
        del dst_ranks, timeout
        step = _validate.step_number(step)
        # Before the lock, which a thread of the parent may have held when this process was forked.
        self._server.check_process()
        self._check_open()
        started = time.perf_counter()
        with self._sending:
            packed = StateSnapshot(state_dict, self._stager, self._snapshot)
            packed.publish(self._server, step, compat.bodies(packed.rebuild, self._num_chunks))
        self._warn_of_refusals(packed.globals)
        logger.debug("step %d is published (%.4f s)", step, time.perf_counter() - started)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Fetches ``step`` from the transport whose ``metadata()`` this is.

        Args:
            src_rank: ignored, as in torchft
            metadata: from the source, of this class or of torchft's own; or of several sources that hold the same
                state, joined by :func:`join_metadata`
            step: the step to fetch
            timeout: the deadline for the whole receive

        Returns:
            The state with its tensors on the CPU, or with ``state_dict=`` in the receiver's own tensors. If it fails in
            the middle, some of these may hold new values already; on an accelerator only bytes that were verified.

        Raises:
            FetchTimeout: the deadline passed, or the source sent nothing for too long
            ConnectError: the source cannot be reached or went away
            WrongStep: the source serves another step
            CorruptCheckpoint: bytes did not match their checksums
            TornCheckpoint: the source kept changing its state while it served it; what is returned was all there at one
                moment
            SourceChanged: the source withdrew the state before all of it was here
            ForkedProcess: this process was forked from the one that made the transport
            UnprovenSource: the source does not know the shared secret, shows another certificate than its metadata
                names, or, where this transport has ``tls=True``, does not encrypt
            StateMismatch: the live state's tensors differ in dtype or shape, cannot be written to, or share memory that
                the source's do not share; or ``strict`` is set and one side has tensors that the other one lacks. Then
                nothing was overwritten. Or a tensor was given other memory while its values came: then some were.
            UnsafePickle: the state holds objects that are not on the allow-list
            InvalidArgument: the metadata names no source, an argument is of the wrong kind, ``state_dict`` gives
                nothing that tensors could be in, or a graph is being captured on the stream in use and the live state
                is on an accelerator
            TransportClosed: after :meth:`shutdown`
        """
        del src_rank
        self._server.check_process()
        self._check_open()
        step, seconds_given = _validate.step_number(step), _validate.seconds("timeout", timeout)
        started = time.perf_counter()
        sources = _validate.string("metadata", metadata).split()
        if self._options.tls:
            sources = encrypted(sources)
        if len(sources) == 1 and is_stock(sources[0]):
            metadata = sources[0]
            if self._options.secret is not None:
                raise UnprovenSource(
                    f"{metadata} is a stock torchft source, which cannot prove that it knows the shared secret: a "
                    "transport that has one receives from none of them. While a fleet is upgraded replica by replica, "
                    "run it without a secret"
                )
            targets = self._targets() if self._state_dict is not None else None
            state = compat.receive(metadata, step, timeout, self._allowed)
            fit = None
            if targets is not None:
                state, fit = targets.fill(state), targets.fit
            seconds = time.perf_counter() - started
            logger.info("received step %d from a stock torchft source in %.3f s%s", step, seconds, in_place(fit))
            self._warn_of_misses(fit)
            return cast(T, state)
        try:
            state, report, fit = self._fetch(sources, step, seconds_given)
        except BaseException:
            self._server.note_receive(None, time.perf_counter() - started)
            raise
        seconds = time.perf_counter() - started
        self._server.note_receive(report, seconds)
        log_receive(step, report, fit, seconds)
        self._warn_of_misses(fit)
        return cast(T, state)

    def _targets(self, lands: bool = False) -> InPlaceTargets:
        """The live state as it is now. ``lands``: see :class:`InPlaceTargets`."""
        assert self._state_dict is not None
        return InPlaceTargets(self._state_dict(), self._bounce.accelerator, lands, self._strict)

    def _fetch(self, sources: list[str], step: int, timeout: float) -> tuple[Any, Report, InPlace | None]:
        """The state, and how its transfer went."""
        remote = Remote.open(
            sources,
            step,
            timeout=timeout,
            lanes=self._num_chunks or None,
            same_host=self._options.same_host,
            pool=self._pool,
            progress=self._progress,
            secret=self._options.secret,
        )
        # Bytes of several sources may turn out to be of another snapshot when all are here.
        live = None if self._state_dict is None else lambda: self._targets(lands=len(sources) == 1)
        with contextlib.closing(remote):
            return receive(remote, self._allowed, live, self._bounce)

    def allow_checkpoint(self, step: int) -> None:
        """Serves what is published under the number ``step``; waiting requests go on.

        Raises:
            InvalidArgument: the step is no whole number of 64 bits
            TransportClosed: after :meth:`shutdown`
        """
        step = _validate.step_number(step)
        self._check_open()
        self._server.allow(step)

    def disallow_checkpoint(self) -> None:
        """Withdraws what is published; from now on requests wait.

        A private copy (accelerator state, ``snapshot="copy"``) is let go of at once and running transfers finish from
        it. Borrowed CPU memory is drained: receives that have begun may finish for at most the transport's timeout and
        are cut off then; one that asks for nothing for two seconds is not waited for. When this returns, the state may
        be changed: nothing of it is read any more. It does not raise into the trainer.
        """
        withdraw(self._server, self._timeout)

    def __getstate__(self) -> Any:
        """Refused: a transport is threads, memory and an open port of its own process.

        Raises:
            TypeError: always, as Python has it for what cannot be pickled or copied
        """
        raise TypeError(
            "an HTTPTransport serves the memory of its own process and can neither be copied nor sent to another one: "
            "make one there, and pass it what metadata() gives here"
        )

    def shutdown(self, wait: bool = True) -> None:
        """Ends the server and all transfers from it; a receive that has begun goes on.

        From then on the transport neither sends nor receives. ``disallow_checkpoint``, ``shutdown`` and ``metadata``
        can still be called.

        Args:
            wait: return only when the port is closed
        """
        self._is_closed = True
        self._server.shutdown(5.0 if wait else 0.0)
        self._stager.close()
        self._bounce.close()

    @property
    def _disallowed(self) -> bool:
        return not self._server.allowed

    @property
    def _step(self) -> int:
        step = self._server.step
        return -1 if step is None else step

    def _check_open(self) -> None:
        """Raises :class:`TransportClosed` after the shutdown."""
        if self._is_closed:
            raise TransportClosed(
                "this HTTPTransport was shut down and neither sends nor receives any more: make a new one"
            )

    def _warn_of_misses(self, fit: InPlace | None) -> None:
        """Says once that nothing at all came in place: then the live state has another shape than the source's."""
        if fit is None or fit.landed or not fit.offered or self._warned_of_misses:
            return
        self._warned_of_misses = True
        logger.warning(
            "none of the source's %d tensors has its counterpart in what state_dict= gives, and all of them came into "
            "fresh memory: the first one is at %s there, and at %s here; torchft's Manager sends "
            '{"user": {"default": ...}, "torchft": ...}',
            fit.offered,
            fit.there,
            fit.here,
        )

    def _warn_of_refusals(self, globals_: dict[tuple[str, str], str]) -> None:
        """Says on the healthy side already what a receiver with the same list will refuse."""
        for module, name in globals_.keys() - self._warned:
            if not self._allowed.allows(module, name):
                self._warned.add((module, name))
                logger.warning("receivers will refuse this state: %s", refusal(module, name, globals_[module, name]))


class _Gate:
    """What torchft's own test asks of the lock its transport has."""

    def __init__(self, transport: HTTPTransport[Any]) -> None:
        self._transport = transport

    def w_locked(self) -> bool:
        """Whether requests are kept waiting."""
        return self._transport._disallowed
