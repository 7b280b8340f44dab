"""The strategy that loads: from tensorferry's files, or from the memory of a running job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

from .. import _validate
from ..dcp import FileReader, PeerReader
from ..dcp.reader import SliceReader
from ..errors import TensorferryError
from ..net.network import Network, network_of
from ..pickles.allowlist import Allowed
from ..pickles.torch_archives import unpickled
from ..state.optimizers import warn_of_missing
from ..storage.folder import INDEX
from ..storage.whole_files import create_folder, is_file
from . import common, release, shards
from .interfaces import LoadShardedStrategy
from .loading import Loading, common_in
from .release import (
    COMMON,
    CONFIG_FNAME,
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
)
from .save import BACKEND, VERSION
from .together import OfRanks, Together


class LoadStrategy(OfRanks, LoadShardedStrategy):
    """Loads a sharded state: for ``dist_checkpointing.load(..., sharded_strategy=load_strategy())``, in every release.

    Args:
        peers: load from the memory of a running job instead of a folder: what ``metadata()`` of its ``PeerWriter``
            returned
        threads: as for ``FileReader``
        timeout: as for ``PeerReader``; and how long a rank waits for the others to begin the same load
        lanes: as for ``PeerReader``
        network: as for ``PeerReader`` and ``FileReader``
        secret: as for ``PeerReader``
        safe_globals: classes and functions that pickled objects may name besides the default list
        trust_pickle: let pickled objects name anything
        process_group: the ranks that load together; ``None`` means all. It may be of gloo where the default one is of
            NCCL
        store_options: options of obstore for a store, as for ``FileReader``

    Raises:
        InvalidArgument: an argument cannot be used; the message names it

    Attributes:
        process_group: the ranks that load together
        timeout: how long a rank waits for the others to begin, and for peers
        report: what the last load read on this rank, as ``FileReader.report`` and ``PeerReader.report``
    """

    def __init__(
        self,
        *,
        peers: str | None = None,
        threads: int | None = None,
        timeout: timedelta = timedelta(minutes=5),
        lanes: int | None = None,
        network: Network | None = None,
        secret: str | bytes | None = None,
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
        process_group: Any = None,
        store_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._peers = peers
        self._store_options = store_options
        pickles: dict[str, Any] = {
            "safe_globals": tuple(_validate.items("safe_globals", safe_globals)),
            "trust_pickle": trust_pickle,
        }
        self._network = network_of(network, secret=secret)
        both = {"network": self._network, **pickles}
        self._of_files: dict[str, Any] = {"threads": threads, "store_options": store_options, **both}
        self._of_peers: dict[str, Any] = {"timeout": timeout, "lanes": lanes, **both}
        # Wrong arguments are refused here.
        FileReader(".", **self._of_files)
        PeerReader(peers, **self._of_peers)
        self._allowed = Allowed(pickles["safe_globals"], trust_pickle)
        self.process_group = process_group
        self.timeout = timeout
        self.report: dict[str, int] = {}
        #: The common state with which what is loaded now will be merged, if it was read before.
        self._common: bytes | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Always true."""
        return True

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Checks the backend of a checkpoint; the name of the argument is Megatron's.

        Raises:
            CheckpointingException: it is not that of this strategy
        """
        if loaded_version != BACKEND:
            raise CheckpointingException(
                f"the checkpoint is of backend {loaded_version!r}, and this strategy reads {BACKEND!r}: load it with "
                "megatron.core.dist_checkpointing.load, without sharded_strategy=, or convert it with "
                "tensorferry convert OLD NEW --to dcp"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Checks the version of a checkpoint's format.

        Raises:
            CheckpointingException: this package does not read it: it is newer, or not a version at all
        """
        if type(loaded_version) is not int or not 1 <= loaded_version <= VERSION:
            raise CheckpointingException(
                f"the checkpoint has version {loaded_version!r} of the format {BACKEND!r}, and this package reads "
                f"versions up to {VERSION}: update tensorferry"
            )

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path, async_strategy: str | None = None) -> Any:
        """Loads the state, into the data of its tensors where they have some. All ranks call it.

        Leaves without data get some in host memory.

        Args:
            sharded_state_dict: dicts and lists of ``ShardedTensor`` and ``ShardedObject``
            checkpoint_dir: the folder, or the URL of a place in an object store; with ``peers``, it is not read
            async_strategy: not used

        Returns:
            The same dicts and lists with tensors and values in place of the leaves.

        Raises:
            CheckpointingException: a key is not in the checkpoint or has another shape, an object may not be unpickled,
                or something cannot be read or is damaged; it is raised on all ranks
        """
        del async_strategy
        ranks = self._ranks()
        with ranks.counting_on_each_other():
            loading = self._open(ranks, sharded_state_dict, checkpoint_dir)

            def read() -> None:
                loading.clear()
                self._read(ranks, loading)

            # Here all ranks have found what they need.
            ranks.every(f"load {self.name(checkpoint_dir)}", read)
        return shards.replaced(sharded_state_dict, loading.value)

    def _open(self, ranks: Together, state: Any, checkpoint_dir: str | Path) -> Loading:
        """Reads the index on all ranks, and plans what this rank reads."""
        opened: Loading | None = None

        def plan_own() -> Any:
            nonlocal opened
            reader, metadata = self._index(checkpoint_dir, ranks.rank)
            if ranks.coordinates:
                self._check_common(checkpoint_dir, reader, metadata)
            opened = Loading(state, metadata, reader)
            if ranks.coordinates:
                wanted = [*opened.objects, *(item.storage_index.fqn for item in opened.tensors)]
                warn_of_missing(wanted, lambda: metadata.state_dict_metadata)
            return reader.prepare_local_plan(LoadPlan([])).storage_data

        def compare(digests: list[Any]) -> None:
            assert opened is not None
            opened.reader.prepare_global_plan([LoadPlan([], storage_data=digest) for digest in digests])

        def compare_ways(ways: list[str]) -> None:
            if len(set(ways)) > 1:
                raise CheckpointingException(
                    f"the ranks load in different ways, {' and '.join(sorted(set(ways)))}: make the same strategy on "
                    "all ranks"
                )

        what = f"load {self.name(checkpoint_dir)}"
        # First, since a strategy may take steps of its own while it reads.
        ranks.step(what, lambda: type(self).__name__, compare_ways)
        ranks.step(what, plan_own, compare)
        assert opened is not None
        return opened

    def _read(self, ranks: Together, loading: Loading) -> None:
        """Reads what :meth:`_open` has planned for this rank."""
        del ranks
        loading.read([*loading.objects.values(), *loading.tensors])
        self.report = dict(loading.reader.report)

    @contextlib.contextmanager
    def beside_common(self, data: bytes | None) -> Iterator[None]:
        """Within it, a load reads the save whose common state is ``data``, as :meth:`encoded_common` has read it."""
        self._common = data
        try:
            yield
        finally:
            self._common = None

    def _check_common(self, checkpoint_dir: str | Path, reader: SliceReader, metadata: Metadata) -> None:
        """Checks that ``common.pt``, and the common state that was read before, are of the same save as the index."""
        copy = common_in(reader, metadata)
        if copy is None:
            return
        if self._peers is None and common.read(self.place(checkpoint_dir)) != copy:
            raise CheckpointingException(
                f"{checkpoint_dir}/common.pt is not that of the checkpoint: a save into this folder was interrupted "
                "after it had written the file. tensorferry.megatron.restore_common(folder) writes it anew from the "
                "checkpoint; or save each checkpoint into a folder of its own"
            )
        if self._common not in (None, copy):
            raise CheckpointingException(
                f"{self.name(checkpoint_dir)}: another save has replaced the checkpoint while it was loaded: load again"
            )

    @property
    def is_live(self) -> bool:
        """Whether it loads from a running job, and not from a folder."""
        return self._peers is not None

    def name(self, checkpoint_dir: str | Path) -> str:
        """Returns what messages call the checkpoint."""
        return str(checkpoint_dir) if self._peers is None else "from the running job"

    def _index(
        self, checkpoint_dir: str | Path, rank: int = 0, checks_folder: bool = True
    ) -> tuple[SliceReader, Metadata]:
        """Opens the checkpoint.

        Raises:
            CheckpointingException: the folder holds none that this strategy reads
            TensorferryError: it cannot be read
        """
        reader: SliceReader
        if self._peers is not None:
            reader = PeerReader(self._peers, **self._of_peers)
            metadata = reader.read_metadata(rank=rank)
        else:
            if checks_folder:
                self.check_folder(checkpoint_dir)
            reader = FileReader(checkpoint_dir, **self._of_files)
            metadata = reader.read_metadata(rank=rank)
        reader.set_up_storage_reader(metadata, False)
        return reader, metadata

    def check_folder(self, checkpoint_dir: str | Path) -> None:
        """Checks that a folder is marked as a checkpoint of a format that this strategy reads, by ``metadata.json``.

        A folder with an index and without the mark passes. With the mark, the other files are not looked for.

        Raises:
            CheckpointingException: it is not; the text says what it holds
            InvalidArgument: ``checkpoint_dir`` cannot be used
            TensorferryError: the folder cannot be examined, or a store does not answer, or refuses
        """
        folder = self.place(checkpoint_dir)
        if is_file(folder / INDEX) and not is_file(folder / CONFIG_FNAME):
            # A save by this package's strategy itself, without Megatron's save, which writes that file. A load with
            # Megatron's load insists on it.
            return
        config = common.config(folder)
        # FullyParallelSaveStrategyWrapper since 0.17 writes its own backend into metadata.json, whatever it wraps.
        if config.sharded_backend != "torch_dist" or not is_file(folder / INDEX):
            self.check_backend_compatibility(config.sharded_backend)
            self.check_version_compatibility(config.sharded_backend_version)

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Metadata | None = None) -> dict[str, Any]:
        """Returns the tensors of a checkpoint by key, as ``ShardedTensor`` without data and without shards.

        Raises:
            CheckpointingException: the checkpoint cannot be read
        """
        metadata = self._metadata(checkpoint_dir) if metadata is None else metadata
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(about.size, dtype=about.properties.dtype, device="meta")
            ).without_data()
            for key, about in metadata.state_dict_metadata.items()
            if isinstance(about, TensorStorageMetadata) and key != COMMON
        }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Like :meth:`load_tensors_metadata`, with the checkpoint's objects by their unique keys.

        Raises:
            CheckpointingException: the checkpoint cannot be read
        """
        metadata = self._metadata(checkpoint_dir)
        objects = {
            key: shards.object_of(key)
            for key, about in metadata.state_dict_metadata.items()
            if isinstance(about, BytesStorageMetadata)
        }
        if COMMON in metadata.state_dict_metadata and release.COMMON_IS_SHARDED:
            # Megatron's own strategy has it as an object there, and Megatron's load leaves it out of its checks.
            common_part = ShardedObject(COMMON, None, (1,), (0,)).without_data()
            objects[common_part.unique_key] = common_part
        return {**objects, **self.load_tensors_metadata(checkpoint_dir, metadata)}

    def _metadata(self, checkpoint_dir: str | Path) -> Metadata:
        try:
            return self._index(checkpoint_dir)[1]
        except TensorferryError as e:
            raise CheckpointingException(str(e)) from e

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Refuses: a committed checkpoint does not change.

        Raises:
            CheckpointingException: always
        """
        raise CheckpointingException(
            f"cannot remove {key_prefix}* from {checkpoint_dir}: a checkpoint of tensorferry's is not changed. Load "
            "what is to stay, and save it again without these keys"
        )

    def common_state(self, checkpoint_dir: str | Path) -> Any:
        """Returns the common state of a checkpoint; an empty dict if it has none.

        Raises:
            CheckpointingException: the checkpoint cannot be read, or needs something that is not on the allow-list
        """
        return self.decoded_common(self.encoded_common(checkpoint_dir))

    def encoded_common(self, checkpoint_dir: str | Path) -> bytes | None:
        """Returns the common state of a checkpoint as ``torch.save`` wrote it; ``None`` if it has none.

        Raises:
            CheckpointingException: the checkpoint cannot be read
        """
        if self._peers is not None:
            return self.common_bytes(checkpoint_dir)
        try:
            return common.read(self.place(checkpoint_dir))
        except (OSError, TensorferryError) as e:
            raise CheckpointingException(str(e)) from e

    def decoded_common(self, data: bytes | None) -> Any:
        """Returns what :meth:`encoded_common` has read.

        Raises:
            CheckpointingException: it is damaged, or needs something that is not on the allow-list
        """
        if data is None:
            return {}
        try:
            return unpickled(data, "the common state", self._allowed)
        except TensorferryError as e:
            raise CheckpointingException(str(e)) from e

    def common_bytes(self, checkpoint_dir: str | Path, checks_folder: bool = True) -> bytes | None:
        """Returns the copy of ``common.pt`` that is inside the checkpoint; ``None`` if there is none.

        Args:
            checkpoint_dir: the folder
            checks_folder: whether ``metadata.json`` must be there and fit

        Raises:
            CheckpointingException: the checkpoint cannot be read
        """
        try:
            return common_in(*self._index(checkpoint_dir, checks_folder=checks_folder))
        except TensorferryError as e:
            raise CheckpointingException(str(e)) from e

    def make_folder(self, checkpoint_dir: str | Path) -> None:
        """Writes ``common.pt`` and ``metadata.json`` into a folder: Megatron's own ``load`` needs them, from peers too.

        The folder is made if it is missing.

        Raises:
            CheckpointingException: the publication cannot be read
            InvalidArgument: ``checkpoint_dir`` cannot be used
            OSError, TensorferryError: the folder cannot be made, or a file cannot be written
        """
        folder = self.place(checkpoint_dir)
        create_folder(folder)
        common.write(folder, self.common_bytes(checkpoint_dir) or common.encoded({}))
        common.mark(folder, BACKEND, VERSION)


#: What users call, in every release.
load_strategy = LoadStrategy
