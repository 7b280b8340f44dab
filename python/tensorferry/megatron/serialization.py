"""``save``, ``load`` and their companions, as in ``dist_checkpointing.serialization``, for our strategies.

Megatron's own functions take the strategies as well. But what they check before they call a strategy, they check on
one rank: the others wait for it in the next collective, for ever. These functions raise every error on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..dcp import PeerWriter
from ..storage.places import any_place
from . import common, shards
from .load import LoadStrategy, load_strategy
from .release import (
    COMMON,
    CheckpointingException,
    ShardedObject,
    StrictHandling,
    adjust_non_strict_load,
    apply_factory_merges,
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
    is_main_replica,
    load_preprocess,
    merge,
    parse_strict_flag,
    save_preprocess,
    takes,
)
from .save import BACKEND, VERSION, SaveStrategy, save_strategy
from .together import Together

T = TypeVar("T")

logger = logging.getLogger("tensorferry")

_CONTENT = "content_metadata"
#: An object of Megatron's content metadata that cannot be saved, and that Megatron leaves out, too.
_NOT_SAVED = "dp_cp_group"
_RAISING = (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
_LOGGING = (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL)
_WANTS_MISSING = (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL)
_RETURNING = (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


def save(
    sharded_state_dict: Any,
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    *,
    async_sharded_save: bool = False,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str = "mcore",
) -> Any:
    """Saves a state into a folder or an object store, as ``dist_checkpointing.save``. All ranks call it.

    Args:
        sharded_state_dict: a nested state with sharded tensors, sharded objects, factories, and other values, which
            are the same on all ranks
        checkpoint_dir: a folder that exists, or the URL of a place in an object store
        sharded_strategy: what :func:`save_strategy` returned, or Megatron's ``FullyParallelSaveStrategyWrapper`` of it
        async_sharded_save: return the ``AsyncRequest`` that the caller schedules
        content_metadata: a description of the content, which :func:`load_content_metadata` returns; it is added to
            ``sharded_state_dict``, under the key ``content_metadata``
        async_strategy: which of Megatron's queues the request is for

    Returns:
        ``None``, or the request, whose last functions commit the checkpoint.

    Raises:
        CheckpointingException: the state cannot be saved; it is raised on all ranks, and also by the last functions of
            a request. Or ``sharded_strategy`` is not of this package
    """
    strategy = save_strategy() if sharded_strategy is None else sharded_strategy
    ours = _own_strategy(strategy, SaveStrategy, "save_strategy")
    ranks = Together(ours.process_group, ours.timeout)
    found: list[Any] = []

    def prepare() -> list[tuple[Any, ...]]:
        nonlocal checkpoint_dir
        if ours.peers is None:
            # The commit of an asynchronous save comes later, and the current folder may be another one by then.
            place = ours.place(checkpoint_dir)
            checkpoint_dir = place if isinstance(place, Path) else str(place)
            if ranks.coordinates and isinstance(place, Path) and not place.is_dir():
                raise CheckpointingException(f"Checkpoint directory {place} does not exist: create it first")
        if content_metadata is not None:
            kept = {key: value for key, value in content_metadata.items() if key != _NOT_SAVED}
            sharded_state_dict[_CONTENT] = kept
        state, shared = save_preprocess(sharded_state_dict, False)
        parts = shards.access((leaf for _, leaf in shards.leaves(state)), is_main_replica)
        state[COMMON] = ShardedObject(COMMON, shared, (1,), (0,), ranks.rank)
        found.append(state)
        return parts

    def check(parts: list[list[tuple[Any, ...]]]) -> None:
        if strategy is not ours:
            # Megatron's wrapper would check it on one rank alone.
            shards.check_access(parts)

    marks = ranks.coordinates and ours.peers is None

    def mark() -> None:
        if marks:
            common.mark(ours.place(checkpoint_dir), ours.backend, ours.version)

    def commit() -> None:
        # Since the write began the ranks have run on their own, so they have to agree afresh on who is still there.
        Together(ours.process_group, ours.timeout).every("write metadata.json", mark)

    def begin() -> Any:
        if not async_sharded_save:
            return strategy.save(found[0], checkpoint_dir)
        if strategy is ours:
            return ours.async_save(found[0], checkpoint_dir, async_strategy)
        return _async_save(strategy, found[0], checkpoint_dir, async_strategy)

    with ranks.counting_on_each_other():
        ranks.step(f"save into {checkpoint_dir}", prepare, check)
        if strategy is ours:
            with ours.among(ranks):
                request = begin()
            if not async_sharded_save:
                ranks.every("write metadata.json", mark)
    if strategy is not ours:
        request = _call_strategy(f"save into {checkpoint_dir}", strategy, begin)
        if not async_sharded_save:
            commit()
    if not async_sharded_save:
        return None
    request.finalize_fns.append(commit)
    return request


def load(
    sharded_state_dict: Any,
    checkpoint_dir: str | Path = "",
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> Any:
    """Loads a state, as ``dist_checkpointing.load``. All ranks call it.

    Args:
        sharded_state_dict: the nested state to be loaded; sharded tensors are loaded into their data
        checkpoint_dir: the folder, or the URL of a place in an object store; not read if the strategy loads from a
            running job
        sharded_strategy: what :func:`load_strategy` returned, or a wrapper of it
        validate_access_integrity: check that the main replicas of all ranks make up each tensor and object
        strict: what to do about keys that only the checkpoint or only the state has, as Megatron's ``StrictHandling``

    Returns:
        The state; and with the ``RETURN_...`` modes, a tuple of it, the missing keys and the unexpected keys.

    Raises:
        CheckpointingException: the checkpoint cannot be read, or does not have what is asked for; it is raised on all
            ranks. Unexpected keys are found before anything is overwritten. Or ``sharded_strategy`` is not of this
            package
    """
    strategy = load_strategy() if sharded_strategy is None else sharded_strategy
    ours = _own_strategy(strategy, LoadStrategy, "load_strategy")
    ranks = Together(ours.process_group, ours.timeout)
    handling = parse_strict_flag(strict)
    where = f"load {ours.name(checkpoint_dir)}"
    shared: Any = None
    wanted: Any = None
    own: Any = None
    factories: Any = None

    def prepare() -> tuple[list[tuple[Any, ...]], set[str]]:
        nonlocal wanted, own, factories
        if not ours.is_live:
            ours.check_folder(checkpoint_dir)
        force_all_tensors_to_non_fp8(sharded_state_dict)
        wanted, own, factories = load_preprocess(sharded_state_dict)
        wanted, _ = extract_sharded_base(wanted)
        found = [leaf for _, leaf in shards.leaves(wanted)]
        return shards.access(found, is_main_replica), {leaf.key for leaf in found}

    def compare(told: list[tuple[list[tuple[Any, ...]], set[str]]]) -> tuple[set[str], set[str], bytes | None]:
        # One rank reads it for all.
        common_bytes = ours.encoded_common(checkpoint_dir)
        if validate_access_integrity:
            shards.check_access(access for access, _ in told)
        if not StrictHandling.requires_explicit_ckpt_mismatch_check(handling):
            return set(), set(), common_bytes
        asked = set().union(*[keys for _, keys in told])
        # The common part is no key of a state: Megatron's own load leaves it out, too.
        known = {leaf.key for leaf in strategy.load_sharded_metadata(checkpoint_dir).values()} - {COMMON}
        missing = known - asked if handling in _WANTS_MISSING else set()
        unexpected = asked - known
        if handling in _RAISING and (missing or unexpected):
            raise CheckpointingException(_mismatch(missing, unexpected))
        return missing, unexpected, common_bytes

    with ranks.counting_on_each_other():
        missing, unexpected, common_bytes = ranks.step(where, prepare, compare)

        def begin() -> None:
            nonlocal shared
            shared = ours.decoded_common(common_bytes)
            merge(shared, own)

        ranks.every(where, begin)
        if (missing or unexpected) and handling in _LOGGING and ranks.coordinates:
            logger.warning("%s", _mismatch(missing, unexpected))
        if unexpected:
            wanted = adjust_non_strict_load(wanted, unexpected)

        def finish() -> None:
            merge(shared, loaded)
            apply_factory_merges(shared, factories)

        if strategy is ours:
            with ours.among(ranks), ours.beside_common(common_bytes):
                loaded = strategy.load(wanted, checkpoint_dir)
            ranks.every(where, finish)
    if strategy is not ours:
        with ours.beside_common(common_bytes):
            loaded = _call_strategy(where, strategy, lambda: strategy.load(wanted, checkpoint_dir))
        # It may have failed on one rank: the others do not wait for that one as long as for a collective.
        Together(ours.process_group, ours.timeout).every(where, finish)
    return (shared, missing, unexpected) if handling in _RETURNING else shared


def _mismatch(missing: set[str], unexpected: set[str]) -> str:
    """Returns the message for keys that only the checkpoint has, and keys that it does not have."""
    parts = []
    if unexpected:
        parts.append(f"Unexpected keys (not found in the checkpoint): {sorted(unexpected)}")
    if missing:
        parts.append(f"Missing keys (in the checkpoint, and asked for by no rank): {sorted(missing)}")
    return "; ".join(parts)


def publish(sharded_state_dict: Any, peers: PeerWriter, **options: Any) -> str:
    """Publishes a state from memory, for jobs with any placements. All ranks call it.

    Args:
        sharded_state_dict: as for :func:`save`
        peers: this rank's writer; its options and methods are described with it
        options: other arguments of :func:`save_strategy`

    Returns:
        What the other job passes to ``load_strategy(peers=)``; the same on all ranks.

    Raises:
        CheckpointingException: the state cannot be published; it is raised on all ranks, and none publishes it
        InvalidArgument: as for :func:`save_strategy`
    """
    save(sharded_state_dict, "", save_strategy(peers=peers, **options))
    return peers.metadata()


def load_tensors_metadata(checkpoint_dir: str | Path, sharded_strategy: Any = None) -> dict[str, Any]:
    """Returns the tensors of a checkpoint by key, as ``ShardedTensor`` without data and without shards.

    Raises:
        CheckpointingException: the checkpoint cannot be read
    """
    found: dict[str, Any] = (sharded_strategy or load_strategy()).load_tensors_metadata(checkpoint_dir)
    return found


def load_sharded_metadata(checkpoint_dir: str | Path, sharded_strategy: Any = None) -> dict[str, Any]:
    """Like :func:`load_tensors_metadata`, with the checkpoint's objects by their unique keys.

    Raises:
        CheckpointingException: the checkpoint cannot be read
    """
    found: dict[str, Any] = (sharded_strategy or load_strategy()).load_sharded_metadata(checkpoint_dir)
    return found


def load_plain_tensors(checkpoint_dir: str | Path, sharded_strategy: Any = None) -> Any:
    """Returns all tensors of a checkpoint by key, each whole, on every rank; all ranks of the job must call it.

    Raises:
        CheckpointingException: the checkpoint cannot be read
    """
    strategy = sharded_strategy or load_strategy()
    state = load_tensors_metadata(checkpoint_dir, strategy)
    return strategy.load(state, checkpoint_dir)


def load_common_state_dict(checkpoint_dir: str | Path, sharded_strategy: Any = None) -> Any:
    """Returns the common part of a checkpoint: what was the same on all ranks; an empty dict if it has none.

    Raises:
        CheckpointingException: the checkpoint cannot be read, or needs something that is not on the allow-list
    """
    return (sharded_strategy or load_strategy()).common_state(checkpoint_dir)


def load_content_metadata(
    checkpoint_dir: str | Path | None = None, *, preloaded_state_dict: dict[str, Any] | None = None
) -> Any:
    """Returns the ``content_metadata`` of a save; ``None`` if it had none.

    Args:
        checkpoint_dir: the folder
        preloaded_state_dict: a state that was loaded from it, instead

    Raises:
        CheckpointingException: the checkpoint cannot be read
        ValueError: neither of the two is given
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("pass checkpoint_dir, or preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(_CONTENT)


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str) -> None:
    """Refuses, as :meth:`LoadStrategy.remove_sharded_tensors` does.

    Raises:
        CheckpointingException: always
    """
    load_strategy().remove_sharded_tensors(checkpoint_dir, key_prefix)


def restore_common(checkpoint_dir: str | Path) -> None:
    """Writes ``common.pt`` and ``metadata.json`` anew, from the checkpoint that the index names; one rank calls it.

    A save into the same folder that was killed can leave one of them damaged, or ahead of the index.

    Raises:
        CheckpointingException: the checkpoint cannot be read, or has no copy of ``common.pt``
        InvalidArgument: ``checkpoint_dir`` cannot be used
        OSError, TensorferryError: a file cannot be written
    """
    place = any_place(checkpoint_dir, "checkpoint_dir")
    data = load_strategy().common_bytes(checkpoint_dir, checks_folder=False)
    if data is None:
        raise CheckpointingException(f"{checkpoint_dir} has no copy of common.pt: load another checkpoint")
    common.write(place, data)
    common.mark(place, BACKEND, VERSION)


def _own_strategy(strategy: Any, kind: Any, maker: str) -> Any:
    """Returns the strategy of tensorferry.megatron that ``strategy`` is, or wraps.

    Raises:
        CheckpointingException: it is another one
    """
    found = strategy
    while not isinstance(found, kind) and hasattr(found, "base_strategy"):
        found = found.base_strategy
    if not isinstance(found, kind):
        raise CheckpointingException(
            f"{type(strategy).__name__} is not a strategy of tensorferry.megatron: pass what {maker}() returns, or "
            "call the function of the same name in megatron.core.dist_checkpointing"
        )
    return found


def _call_strategy(what: str, strategy: Any, call: Callable[[], T]) -> T:
    """Returns what ``call`` returns, which calls a wrapper of Megatron's around our strategy; says what has failed.

    Args:
        what: what it does, for the message: "load ..."
        strategy: the wrapper
        call: calls it. It may run collectives of its own

    Raises:
        CheckpointingException: the wrapper has failed on this rank, for example in a collective in which another rank
            did not take part
    """
    try:
        return call()
    except CheckpointingException:
        raise
    except Exception as e:
        raise CheckpointingException(
            f"cannot {what}: {type(strategy).__name__} has failed on this rank ({type(e).__name__}: {e})"
        ) from e


def _async_save(wrapper: Any, state: Any, checkpoint_dir: str | Path, async_strategy: str) -> Any:
    """Calls ``async_save`` of a wrapper, which takes the name of the queue since release 0.19."""
    if takes(wrapper.async_save, "async_strategy"):
        return wrapper.async_save(state, checkpoint_dir, async_strategy)
    return wrapper.async_save(state, checkpoint_dir)
