"""``HTTPTransport``, the drop-in replacement for torchft's class of the same name."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast
from urllib.parse import urlsplit

from .. import _validate
from .._native import ArenaPool, Receive, Remote, Report
from .._reentry import CallLock
from ..errors import ForkedProcess, InvalidArgument, StateMismatch, TransportClosed, UnprovenSource, class_of
from ..memory.accelerator import ACCELERATOR
from ..memory.bounce import BounceBuffers
from ..memory.host_pool import HostMemory
from ..memory.staging import HostStager
from ..net.certificates import Tls
from ..net.metadata import encrypted, hosts_of, is_encrypted, is_stock
from ..net.network import Network, network_of
from ..net.report import InPlace, ReceiveReport, in_place, log_receive
from ..net.serve import metrics_url, serve, withdraw
from ..net.tracing import Span
from ..pickles.allowlist import Allowed, RefusalWarnings
from ..pickles.deadline import Deadline
from ..state.in_place import InPlaceTargets
from ..state.load import receive
from ..state.snapshot import SnapshotMode, StateSnapshot, snapshot_mode
from . import compat
from .live_state import LiveState

if TYPE_CHECKING:
    from torchft.checkpointing.transport import CheckpointTransport
else:
    try:
        from torchft.checkpointing.transport import CheckpointTransport
    except ImportError:
        # Without torchft, HTTPTransport has the same methods and a base class of its own.
        T_co = TypeVar("T_co")

        class CheckpointTransport(Generic[T_co]):
            """Stands in for torchft's base class where torchft is not installed."""


__all__ = ["HTTPTransport"]

logger = logging.getLogger("tensorferry")

T = TypeVar("T")


class HTTPTransport(CheckpointTransport[T]):  # type: ignore[misc]  # torchft has no types
    """Streams training state to healing replicas, and receives it from healthy ones.

    It replaces ``torchft.checkpointing.HTTPTransport``. The constructor starts a server, which serves nothing until
    ``send_checkpoint`` is called.

    Args:
        timeout: how long a request waits for a checkpoint to be allowed, and how long ``disallow_checkpoint`` lets
            readers of borrowed memory finish before it cuts them off
        num_chunks: connections a receive uses; 0 chooses by the number of cores. A stock torchft receiver that heals
            from here must use the same number.
        state_dict: returns the live state; ``recv_checkpoint`` then writes into its tensors and returns them. Tensors
            are matched by path, so the live state must have the structure of the state that the source sends: for
            torchft's Manager ``{"user": {"default": ...}}``. Tensors without a counterpart in it are received into
            fresh memory; the log says how many came in place. Writes to an accelerator run after the work that is
            queued on the calling thread's stream and on the device's default stream. When ``recv_checkpoint`` returns,
            they are done: work that is queued afterwards, on any stream, finds the new values.
        strict: with ``state_dict``, raise ``StateMismatch`` and overwrite nothing unless every tensor of the source's
            state has a counterpart in the live state, and vice versa
        snapshot: ``"borrow"`` serves CPU tensors from where they are; ``"copy"`` takes a private copy in
            ``send_checkpoint``, for states that change while they are served, as BatchNorm's buffers do under torchft's
            Manager. Accelerator tensors are always copied.
        safe_globals: classes and functions that a received pickle may name besides the default list
        trust_pickle: let a received pickle name anything; anyone who can answer in place of the source can then run
            code here
        reuse_bytes: keep up to this many bytes of received memory for the next receive, once all tensors in it are
            gone: fresh memory costs page faults, which take longer than the transfer. With an accelerator the memory is
            page-locked, so that copies from it run at full speed. Forked children cannot read it then, and copies from
            it with ``non_blocking=True`` must have ended before its tensors are deleted
        progress: called with the number of bytes received and the number of all bytes, a few times a second during a
            receive and once at its end; an exception from it ends the receive
        network: how the server is reached and what protects it, and what a receive asks of its sources
        secret, tls, interface: shortcuts for ``network=Network(...)`` with these alone

    Raises:
        SystemRefused: no port can be opened, for example because another program uses the one that was asked for
        InvalidArgument: an argument cannot be used; the message names it
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
        reuse_bytes: int = 0,
        progress: Callable[[int, int], object] | None = None,
        network: Network | None = None,
        secret: str | bytes | None = None,
        tls: Tls = None,
        interface: str | None = None,
    ) -> None:
        reuse_bytes = _validate.integer("reuse_bytes", reuse_bytes, 0)
        self._timeout = timeout
        self._num_chunks = _validate.integer("num_chunks", num_chunks, 0)
        self._state_dict = _validate.function("state_dict", state_dict)
        self._strict = _validate.boolean("strict", strict)
        if strict and state_dict is None:
            raise InvalidArgument("strict=True compares with the live state: pass state_dict=, which returns it")
        self._snapshot = snapshot_mode(snapshot)
        self._allowed = Allowed(safe_globals, trust_pickle)
        self._network = network_of(network, secret=secret, tls=tls, interface=interface)
        self._stager = HostStager(ACCELERATOR)
        self._bounce = BounceBuffers(ACCELERATOR)
        self._sending = CallLock("send_checkpoint()")
        self._live = LiveState()
        self._refusals = RefusalWarnings(self._allowed, "receivers will refuse this state: %s")
        self._warned_of_misses = False
        self._is_closed = False
        self._last_report: ReceiveReport | None = None
        self._pool = ArenaPool(reuse_bytes, HostMemory(ACCELERATOR).make_pinned) if reuse_bytes else None
        self._progress = _validate.function("progress", progress)
        #: Whether a receive is refused whose state does not fit the live one; else it goes into fresh memory.
        self._must_fit = True
        self._sources_besides: Callable[[], list[str]] | None = None
        self._server, self._address = serve(timeout, self._network)

    def address(self) -> str:
        """Returns the URL to which ``{step}.safetensors`` or, by stock peers, ``{step}/full`` is appended."""
        return self._address

    def metadata(self) -> str:
        """Returns the string that a receiver passes to ``recv_checkpoint`` to fetch from here.

        It has a random part: without a shared secret, anyone who knows the string can read the state.
        """
        return self._address

    def metrics_url(self) -> str:
        """Returns the URL at which a Prometheus scraper finds this transport's counters.

        With a ``metrics_port`` it is that port's, which everyone who reaches it may read; otherwise it has the random
        part that gives access to the state as well.

        Raises:
            ForkedProcess: this process was forked from the one that made the transport
        """
        return metrics_url(self._server, self._address)

    def status_url(self) -> str:
        """Returns the URL of a page for people with the same figures; what holds for :meth:`metrics_url` holds for it.

        Raises:
            ForkedProcess: this process was forked from the one that made the transport
        """
        return self.metrics_url().removesuffix("metrics")

    @property
    def last_report(self) -> ReceiveReport | None:
        """How the last receive that succeeded went; ``None`` before that, and after one from a stock torchft source."""
        return self._last_report

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta | None = None) -> None:
        """Publishes ``state_dict`` as ``step`` and returns without waiting for receivers.

        Accelerator tensors are copied to the host. The copies include the effect of the work that is queued on the
        calling thread's stream and on the device's default stream. Receivers can fetch the first bytes while the rest
        is still being copied. When this method returns, accelerator memory is not read any more.

        Args:
            dst_ranks: ignored, as in torchft: any receiver with the metadata may fetch
            step: the step number under which the state is served
            state_dict: any tree of tensors and picklable objects
            timeout: ignored: this method does not wait for receivers

        The memory that CPU tensors have now is served, even if a tensor is given other memory later (``p.data = x``,
        ``module.half()``). But an operation that frees or moves a storage itself must wait until
        ``disallow_checkpoint`` has returned, or needs ``snapshot="copy"``: ``storage.resize_()``, as FSDP1 does,
        ``tensor.resize_()`` to a larger size, and ``share_memory_()``.

        Raises:
            UnsupportedLeaf: a leaf cannot be sent; the message names its path, and what was served before is still
                served
            InvalidArgument: the step is not a signed 64-bit integer, the state is on an accelerator while a graph is
                being captured on its current stream, or this thread is in the middle of another ``send_checkpoint``
            SystemRefused: there is no memory for a copy; what was served before is still served
            ForkedProcess: this process was forked from the one that made the transport
            HalfReceived: a receive into the live state has failed midway, and complete ones have not overwritten all
                tensors that it was to write
            TransportClosed: after :meth:`shutdown`
            Exception: whatever torch raises when a copy off the accelerator fails; then nothing is served any more, and
                all receivers that have begun get an error at once, even those that have received no byte yet
        """
        del dst_ranks, timeout
        step = _validate.step_number(step)
        # Checked before the lock is taken: a thread of the parent may have held it when this process was forked.
        self._server.check_process()
        self._check_open()
        self._live.check_sent()
        started = time.perf_counter()
        with self._sending.held(), Span("send", step=step):
            packed = StateSnapshot(state_dict, self._stager, self._snapshot)
            # A signal handler may have shut it down meanwhile.
            self._check_open()
            packed.publish(self._server, step, compat.bodies(packed.rebuild, self._num_chunks))
        self._refusals.warn(packed.globals)
        logger.debug("step %d is published (%.4f s)", step, time.perf_counter() - started)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta | None = None) -> T:
        """Fetches ``step`` from the transport that returned ``metadata``.

        Args:
            src_rank: ignored, as in torchft
            metadata: what ``metadata()`` of the source returned, a transport of this class or torchft's own; or the
                metadata of several sources with the same state, joined by :func:`join_metadata`
            step: the step to fetch
            timeout: the deadline for the whole receive; ``None`` means the transport's own timeout

        Returns:
            The state, with its tensors on the CPU or, with ``state_dict=``, in the receiver's own tensors. If the
            receive fails, some of these may hold new values already; on an accelerator only verified bytes. Until
            complete receives have overwritten all of them, or :meth:`accept_live_state` is called,
            ``send_checkpoint`` then raises ``HalfReceived``, and so does ``disallow_checkpoint`` from its second call
            on. A state that is returned is the source's state at one moment.

        Raises:
            FetchTimeout: the deadline passed, or the source sent nothing for too long
            ConnectError: the source cannot be reached, or the connection to it was lost
            WrongStep: the source serves another step
            SourceRefused: the source answered with another HTTP error, such as 404 where the metadata is out of date
            ProtocolError: what the source sent is not valid, or not a state
            SystemRefused: the source announced more than this machine has memory for, or the system refuses memory, a
                socket or a thread
            CorruptCheckpoint: bytes did not match their checksums
            TornCheckpoint: the source kept changing its state while serving it
            SourceChanged: the source withdrew the state before all of it was received
            ForkedProcess: this process was forked from the one that made the transport
            UnprovenSource: the source does not know the shared secret, shows another certificate than its metadata
                names, or, if this transport has ``tls=True``, does not encrypt
            StateMismatch: the live state's tensors differ in dtype, shape, kind or part, have another value than a
                tensor in their place, are in a list of another length, cannot be written to, or share memory that the
                source's tensors do not share; or ``strict`` is set and one side has tensors that the other one lacks.
                Nothing was overwritten then. Or a tensor was given other memory during the receive, or torch cannot
                copy the values into it; then some tensors may have been overwritten.
            UnsafePickle: the state holds objects that are not on the allow-list
            InvalidArgument: the metadata names no source, an argument has a wrong type, ``state_dict`` returns
                something that cannot hold tensors, the live state is on an accelerator while a graph is being
                captured on its current stream, or another receive into the live state is under way
            TransportClosed: after :meth:`shutdown`
            Exception: what ``state_dict`` or ``progress`` raises
        """
        del src_rank
        self._server.check_process()
        self._check_open()
        timeout = self._timeout if timeout is None else timeout
        step, seconds_given = _validate.step_number(step), _validate.seconds("timeout", timeout)
        started = time.perf_counter()
        sources = _validate.string("metadata", metadata).split()
        if self._sources_besides is not None and not any(map(is_stock, sources)):
            sources = list(dict.fromkeys(sources + self._sources_besides()))
        if self._network.tls:
            sources = encrypted(sources)
        live = contextlib.nullcontext() if self._state_dict is None else self._live.received(step)
        with live, Span("receive", step=step, sources=len(sources)) as span:
            if len(sources) == 1 and is_stock(sources[0]):
                return self._receive_stock(sources[0], step, timeout, started)
            receive = self._server.begin_receive(step)
            try:
                state, native, fit = self._fetch(sources, step, seconds_given, receive)
            except BaseException as e:
                seconds = time.perf_counter() - started
                failed = f"{type(e).__name__}, of {hosts_of(sources)}"
                receive.end(seconds, failed=failed, counted_as=class_of(e))
                raise
            seconds = time.perf_counter() - started
            receive.end(seconds, native)
            self._last_report = report = ReceiveReport.of(step, native, fit, seconds)
            span.set(bytes=report.bytes, lanes=report.lanes, retries=report.retries)
            encrypts = all(is_encrypted(source) for source in sources)
            log_receive(report, tls=encrypts, secret=self._network.secret is not None)
            self._warn_of_misses(fit)
            return cast(T, state)

    def _receive_stock(self, metadata: str, step: int, timeout: timedelta, started: float) -> T:
        """Receives ``step`` from torchft's own transport; ``started`` is when the receive began."""
        if self._network.secret is not None:
            raise UnprovenSource(
                f"{metadata} is a stock torchft source, which cannot prove that it knows the shared secret: a "
                "transport with a secret does not receive from stock sources. While a fleet is upgraded replica by "
                "replica, run it without a secret"
            )
        targets = self._targets() if self._state_dict is not None else None
        state = compat.receive(metadata, step, timeout, self._allowed)
        fit = None
        if targets is not None:
            try:
                state, fit = targets.fill(state), targets.fit
            except StateMismatch as e:
                targets.give_up(e)
        seconds = time.perf_counter() - started
        self._last_report = None
        logger.info("received step %d from a stock torchft source in %.3f s%s", step, seconds, in_place(fit))
        self._warn_of_misses(fit)
        return cast(T, state)

    def _targets(self, may_stage: bool = False) -> InPlaceTargets | None:
        """Returns the tensors of the live state as receive targets; for ``may_stage`` see :class:`InPlaceTargets`."""
        assert self._state_dict is not None
        try:
            live = self._state_dict()
        except Exception as e:
            if self._must_fit:
                raise
            logger.warning("receiving into fresh memory: state_dict has raised %s: %s", type(e).__name__, e)
            live = None
        if live is None and not self._must_fit:
            return None
        accelerator = self._bounce.accelerator
        targets = InPlaceTargets(live, accelerator, may_stage, self._strict, "state_dict=", must_fit=self._must_fit)
        return self._live.written(targets)

    def _fetch(
        self, sources: list[str], step: int, timeout: float, underway: Receive
    ) -> tuple[Any, Report, InPlace | None]:
        """Fetches a state; returns it with the transfer's report and, with ``state_dict=``, how the live state fit."""
        allowed = self._allowed.until(Deadline(timeout))
        with Span("open"):
            remote = Remote.open(
                sources,
                step,
                timeout=timeout,
                lanes=self._num_chunks or None,
                pool=self._pool,
                progress=self._progress,
                relay=self._server if self._network.relay else None,
                **self._network.receive_options(),
            )
        underway.opened(remote)
        # With several sources it may turn out only at the end that one of them served another snapshot.
        live = None if self._state_dict is None else lambda: self._targets(may_stage=len(sources) == 1)
        with contextlib.closing(remote):
            return receive(remote, allowed, live, self._bounce)

    def receive_into(self, live: Callable[[], T | None]) -> None:
        """Has receives write into the state that ``live`` returns; one that does not fit comes into fresh memory.

        A transport that was given ``state_dict=`` goes on with that.

        Args:
            live: returns the state; what it raises, and ``None``, mean fresh memory
        """
        if self._state_dict is None:
            self._state_dict, self._must_fit = live, False

    def find_sources(self, besides: Callable[[], list[str]] | None) -> None:
        """Sets who names further sources with the state of the one that ``recv_checkpoint`` is given.

        Args:
            besides: returns their metadata, and raises nothing; ``None``: there are none
        """
        self._sources_besides = besides

    def allow_checkpoint(self, step: int) -> None:
        """Serves the published state as ``step``, and answers the requests that are waiting for it.

        Raises:
            InvalidArgument: the step is not a signed 64-bit integer
            TransportClosed: after :meth:`shutdown`
            ForkedProcess: this process was forked from the one that made the transport
        """
        step = _validate.step_number(step)
        self._check_open()
        self._server.allow(step)

    def disallow_checkpoint(self) -> None:
        """Withdraws the published state; from now on requests wait.

        With a private copy (accelerator state, ``snapshot="copy"``) this returns at once, and running transfers finish
        from the copy. With borrowed CPU memory it waits for the receives that have begun, at most for the transport's
        timeout, and then cuts them off; a receive that sends no request, or reads nothing of an answer, for two
        seconds is not waited for. When this returns, the state is not read any more and may be changed.
        Errors are logged and not raised, except ``ForkedProcess``, and of this process's own state ``HalfReceived``.

        Raises:
            ForkedProcess: this process was forked from the one that made the transport
            HalfReceived: as for :meth:`send_checkpoint`, and no receive has failed since the last call: the trainer
                would go on with tensors some of which have new values. What was published is withdrawn.
        """
        withdraw(self._server, self._timeout)
        self._live.end_step()

    def accept_live_state(self) -> None:
        """Says that the live state is whole, for example loaded from a checkpoint, after a receive into it failed."""
        self._live.accept()

    def __getstate__(self) -> Any:
        """Always raises: the threads, the memory and the open port of a transport belong to its own process.

        Raises:
            TypeError: always, as Python does for objects that cannot be pickled or copied
        """
        raise TypeError(
            "an HTTPTransport serves the memory of its own process and can neither be copied nor sent to another one: "
            "make one there, and pass it the string that metadata() returns here"
        )

    def shutdown(self, wait: bool = True) -> None:
        """Stops the server and all transfers from it; a receive of this transport that has begun goes on.

        Afterwards the transport neither sends nor receives. ``disallow_checkpoint``, ``shutdown`` and ``metadata`` can
        still be called.

        Args:
            wait: wait until the port is closed, for at most five seconds

        Raises:
            ForkedProcess: this process was forked from the one that made the transport
        """
        self._is_closed = True
        self._server.shutdown(5.0 if wait else 0.0)
        self._stager.close()
        self._bounce.close()

    def __enter__(self) -> Self:
        """Returns the transport; the end of the ``with`` block shuts it down."""
        return self

    def __exit__(self, *_: object) -> None:
        """Does what :meth:`shutdown` does."""
        self.shutdown()

    def __repr__(self) -> str:
        """Returns where the transport listens and what it serves, without the part of the URL that gives access."""
        url = urlsplit(self._address)
        try:
            state = "serving nothing" if self._disallowed else f"serving step {self._step}"
        except ForkedProcess:
            state = "of the parent process"
        state = "closed" if self._is_closed else state
        return f"<{type(self).__name__} {url.scheme}://{url.netloc}: {state}>"

    @property
    def _disallowed(self) -> bool:
        return not self._server.allowed

    @property
    def _step(self) -> int:
        step = self._server.step
        return -1 if step is None else step

    def _check_open(self) -> None:
        """Raises :class:`TransportClosed` if the transport was shut down."""
        if self._is_closed:
            raise TransportClosed("this HTTPTransport was shut down and can neither send nor receive: make a new one")

    def _warn_of_misses(self, fit: InPlace | None) -> None:
        """Logs once if no tensor came in place: the live state then has another structure than the source's."""
        if fit is None or fit.matched or not fit.offered or self._warned_of_misses:
            return
        self._warned_of_misses = True
        logger.warning(
            "none of the source's %d tensors has a counterpart in the state that state_dict= returns, so all of them "
            "were received into fresh memory: the first one is at %s there, and at %s here; torchft's Manager sends "
            '{"user": {"default": ...}, "torchft": ...}',
            fit.offered,
            fit.there,
            fit.here,
        )
