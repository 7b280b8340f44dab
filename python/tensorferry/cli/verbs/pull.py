"""``tensorferry pull``: fetches what running peers serve into a file or a folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..._validate import readable
from ...errors import InvalidArgument, ProtocolError, SystemRefused, TensorferryError
from ...net.network import Network
from ...net.serve import relaying
from ...storage import commits, leftovers, reserved
from ...storage.folder import INDEX
from ...storage.folder_save import FolderSave, SaveId
from ...storage.places import AnyPlace, any_place, begun, is_store_url, local_path
from ...storage.whole_files import remove_empty
from .. import console, copying, exits, peers, places
from ..copies import scratch_folder
from ..distributed import write_index
from ..download import Download, partial_of, remove_others, was_pulled

if TYPE_CHECKING:
    from ..._native import Remote, Server


def pull(
    metadata: str,
    /,
    *more: str,
    output: Annotated[str | None, Parameter(name=["--output", "-o"])] = None,
    into_folder: str | None = None,
    step: int | None = None,
    timeout: float = peers.TIMEOUT,
    force: bool = False,
    quiet: bool = False,
    json: bool = False,
) -> int:
    """Fetches what running transports serve, verified, into a file or a folder.

    What is incomplete is called .FILE.pull-....partial. After an interruption, the same command goes on: what is there
    is compared with the source's digests, and only the rest is fetched. A file or checkpoint that an earlier pull has
    written is replaced; any other one is not. Into an object store it comes by way of a folder for temporary files, to
    a place where nothing is; after an interruption, it begins again.

    Hosts that pull from one source send each other what they have, unless TENSORFERRY_RELAY=0. The shared secret, TLS
    and shared memory are the environment's, as for every peer.

    Args:
        metadata: what metadata() of a transport or a PeerWriter returned, or `tensorferry serve` printed
        more: the metadata of further sources of the same state, which are fetched from at once
        output: the file, a safetensors file with checksums, or the URL of an object; by default step-N.safetensors
        into_folder: a checkpoint folder, or the URL of a place in an object store, which AsyncCheckpointer.load or, for
            a PeerWriter's publication, FileReader loads; the ranks of a keeper's job, as `tensorferry keeper --status`
            prints them, come into one folder
        step: the step to fetch (default: the one that is served)
        timeout: seconds after which it fails
        force: replace a file, or the checkpoint in a folder, that is not an earlier pull's
        quiet: show no progress
        json: print the result as one JSON document
    """
    if output is not None and into_folder is not None:
        raise InvalidArgument("--output and --into-folder exclude each other")
    given = into_folder if output is None else output
    name = "--into-folder" if output is None else "--output"
    found = peers.Peers.of([metadata, *more])
    with contextlib.ExitStack() as stack:
        there: AnyPlace | None = None
        target = None
        if is_store_url(given):
            if force:
                raise InvalidArgument("--force replaces nothing in an object store: name a place where nothing is")

            there = any_place(given, name)
            target = stack.enter_context(scratch_folder(there, file=into_folder is None)) / (there.name or "pulled")
        elif given is not None:
            target = local_path(given, name)
        server = None if more else _relay_server(stack)
        step = step if step is not None else found.step
        pulled = _Pull(step, timeout, quiet, force, server, resumes=there is None)
        if found.are_ranks:
            if target is None or into_folder is None:
                raise InvalidArgument(
                    "this is the metadata of several ranks, which become a file each: name a folder with --into-folder"
                )
            pulled.ranks(found.urls, target)
        elif target is not None and into_folder is not None:
            pulled.folder(found.urls[:1], [found.urls], target)
        else:
            pulled.file(found.urls, target)
        if there is not None and target is not None:
            pulled.copy(target, there)
    if json:
        console.out_json(pulled.result)
    else:
        told = pulled.result
        relayed = f", {readable(told['relayed'])} from other receivers" if told["relayed"] else ""
        console.out(
            f"{told['path']}: step {told['step']}, {readable(told['bytes'])}, of which {readable(told['fetched'])} "
            f"were fetched in {told['seconds']:.1f} s{relayed}"
        )
    return exits.OK


def _relay_server(stack: contextlib.ExitStack) -> Server | None:
    """Starts the server that serves on what comes, until ``stack`` ends; ``None`` without a port: it helps nobody."""
    network = Network()
    return stack.enter_context(relaying(network, lambda _: None)) if network.relay else None


#: Where a container comes to lie, the file there that it may replace, as ``lstat`` describes it, and what receives it.
_Begun = tuple[Path, os.stat_result | None, Download]


class _Pull:
    """One run of the verb.

    Args:
        step: the step to fetch, ``None`` for the one that is served
        timeout: seconds for each receive
        quiet: show no progress
        force: replace what is not an earlier pull's
        relay: serves on what has come, if this takes part where receivers send each other what they have
        resumes: whether what has come is still there when the same command runs again

    Attributes:
        result: what was fetched
    """

    def __init__(
        self, step: int | None, timeout: float, quiet: bool, force: bool, relay: Server | None, *, resumes: bool
    ) -> None:
        self._step, self._timeout, self._quiet, self._force = step, timeout, quiet, force
        self._relay, self._resumes = relay, resumes
        self._began = time.monotonic()
        self.result: dict[str, Any] = {"bytes": 0, "fetched": 0, "relayed": 0}

    def file(self, urls: list[str], output: Path | None) -> None:
        """Pulls a state into a file."""

        def begin(remote: Remote, step: int) -> _Begun:
            path = output if output is not None else Path(f"step-{step}.safetensors")
            replaced = self._replaced(path)
            if path.suffix in (".pt", ".pth", ".bin"):
                console.warn(f"{path} will not be what its name says, but a safetensors file")
            return path, replaced, Download(remote, partial_of(path, remote, step), step=step)

        path, step = self._fetch(urls, begin)
        remove_others(path)
        self._done(path, step)

    def _replaced(self, path: Path) -> os.stat_result | None:
        """Returns what is known of the file that may be replaced, if there is one.

        Raises:
            InvalidArgument: what is there must stay
            SystemRefused: the system does not say what is there
        """
        try:
            about = path.lstat()
        except FileNotFoundError:
            return None
        except OSError as e:
            raise SystemRefused(e.errno, f"{path}: cannot be written: {e.strerror}") from e
        if path.is_dir():
            raise InvalidArgument(f"{path} is a folder: use --into-folder, or name a file in it")
        # The rename at the end would put the file in the place of a device such as /dev/null.
        if not stat.S_ISREG(about.st_mode):
            raise InvalidArgument(f"{path} is a link, a pipe or a device, which a file would replace: name a file")
        if not self._force and not was_pulled(path):
            raise InvalidArgument(
                f"{path} exists already, and no pull has written it: name another file, or replace it with --force"
            )
        return about

    def _check_folder(self, folder: Path) -> None:
        """Raises if a folder has a checkpoint that must stay: before the pull, and once more in its commit.

        Raises:
            InvalidArgument: it has
        """
        if not self._force and (held := places.checkpoint_that_was_not_pulled(folder)):
            raise InvalidArgument(
                f"{folder} holds a checkpoint already, and no pull has written it ({held}): name another folder, or "
                "replace it with --force"
            )

    def ranks(self, urls: list[str], folder: Path) -> None:
        """Pulls what several ranks serve, a file for each: a distributed checkpoint, or the state of each rank."""
        self._check_folder(folder)
        remote, self._step = peers.open_source(urls[:1], self._step, self._timeout)
        with contextlib.closing(remote):
            kind = next((name for name in (reserved.INDEX, reserved.MANIFEST) if name in remote.names), None)
        if kind is None:
            raise ProtocolError("the first rank serves neither an index of a distributed checkpoint nor a state")
        self.folder(urls, [[url] for url in urls], folder, kind)

    def folder(self, names: list[str], ranks: list[list[str]], folder: Path, kind: str | None = None) -> None:
        """Pulls what each rank serves into a folder, as a checkpointer writes it, or ``FileWriter``.

        Args:
            names: by which an incomplete file of each rank is called
            ranks: the sources of each rank
            folder: the folder
            kind: the entry that every rank must have, or of a distributed checkpoint the first one: its index
        """
        self._check_folder(folder)
        saves: list[FolderSave] = []
        with _removed_unless_committed(folder) as written:

            def begin(remote: Remote, step: int) -> _Begun:
                rank = len(saves)
                # The index would not be read if a rank of it had no state.
                if kind not in (None, *remote.names) and not (rank and kind == reserved.INDEX):
                    raise ProtocolError(f"rank {rank} does not serve {kind} any more, or not as the first rank does")
                first = saves[0].save if saves else SaveId.new(0, len(ranks), step, commits.beginnings(folder / INDEX))
                saves.append(FolderSave(folder, replace(first, rank=rank)))
                written.append(saves[-1].path.name)
                incomplete = folder / _partial_name(names[rank], step)
                return local_path(saves[-1].path), None, Download(remote, incomplete, step=step, unique=True)

            for rank, urls in enumerate(ranks):
                title = f"rank {rank} of {len(ranks)}" if len(ranks) > 1 else ""
                _, self._step = self._fetch(urls, begin, title=title)
            check = partial(self._check_folder, folder)
            if kind == reserved.INDEX:
                write_index(folder, written, saves[0].save.began, check)
            else:
                saves[0].commit(check)
        self._done(folder, self._step)

    def _fetch(self, urls: list[str], begin: Callable[[Remote, int], _Begun], *, title: str = "") -> tuple[Path, int]:
        """Fetches one container; ``begin`` returns, for what was opened and its step, where it comes to lie.

        Returns the path, with the complete file there, and the step. After an error what has come stays, incomplete.
        """
        downloads: list[Download] = []
        with console.progress(title or "fetching", quiet=self._quiet) as progress:

            def watch(done: int, total: int) -> None:
                for download in downloads:
                    download.check()
                progress(done, total)

            remote, step = peers.open_source(urls, self._step, self._timeout, watch, self._relay)
            with contextlib.closing(remote):
                path, replaced, download = begin(remote, step)
                downloads.append(download)
                try:
                    report = download.fetch()
                    download.commit(path, replaced)
                except KeyboardInterrupt:
                    if self._resumes:
                        console.note(f"{download.partial} holds what has arrived: the same command goes on from there")
                    raise
                finally:
                    download.close()
        told = self.result
        told["bytes"] += sum(remote.sizes)
        told["fetched"] += report.bytes
        told["relayed"] += report.relayed
        for source, trouble in report.troubles.items():
            console.warn(f"ranges of {source} were fetched over other connections: {trouble}")
        return path, step

    def copy(self, pulled: Path, there: AnyPlace) -> None:
        """Copies what was pulled to a store."""
        copying.copy(places.find(str(pulled)), begun(there), verify=False)
        self._done(there, self.result["step"])

    def _done(self, path: AnyPlace, step: int | None) -> None:
        self.result |= {"path": str(path), "step": step, "seconds": time.monotonic() - self._began}


@contextlib.contextmanager
def _removed_unless_committed(folder: Path) -> Iterator[list[str]]:
    """Yields a list for the names of the ranks' files; if the block fails, removes them, unless they are committed.

    Without an index these are of no use, and would look like a backup. What is incomplete stays, to be gone on with. An
    exception may come after the commit, too: what the index names stays, and all of them if it cannot be read. A folder
    that was not there before goes if nothing is in it.
    """
    names: list[str] = []
    is_new = not os.path.lexists(folder)
    try:
        yield names
    except BaseException:
        with contextlib.suppress(TensorferryError):
            index = folder / INDEX
            committed = commits.files_of(index).files if os.path.lexists(index) else {}
            leftovers.remove(folder, [name for name in names if name not in committed])
        if is_new:
            remove_empty(folder)
        raise


def _partial_name(url: str, step: int) -> str:
    """Returns the name of an incomplete file in a folder, the same for the same source and step."""
    named = hashlib.blake2b(f"{url}\0{step}".encode(), digest_size=8).hexdigest()
    return f".pull-{named}.partial"
