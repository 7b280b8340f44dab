"""A fleet is upgraded replica by replica: stock torchft replicas heal from ours, and ours from stock ones."""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import urllib.error
import urllib.request
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from equality import OBJECTS, STORAGES, assert_same_state
from leaves import CARRIED, CATALOGUE, STOCK_READS_EMPTY, WHOLE, Leaf, warnings_of
from nights import mostly_at_night
from tensorferry.state.snapshot import StateSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT = timedelta(seconds=30)

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.beyond_torchft,
    # torchft's receiver leaves the socket of a refused request to the collector, which may come in any later test.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

# Warnings of a stock receiver are not tested here.
stock_receiver = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")


@pytest.fixture(autouse=True, scope="module")
def collect_sockets() -> Iterator[None]:
    """Collects sockets that torchft left open, because later tests in other files fail on such warnings."""
    yield
    gc.collect()


@pytest.fixture(params=[pytest.param("stock receiver", marks=stock_receiver), "stock source"])
def open_pair(
    request: pytest.FixtureRequest, open_transport: Callable[..., Any], open_stock: Callable[..., Any]
) -> Callable[..., tuple[Any, Any]]:
    """Opens a source and a receiver: one of them is torchft's, and options go to the other."""

    def open_both(num_chunks: int = 0, **options: Any) -> tuple[Any, Any]:
        ours, stock = open_transport(num_chunks, **options), open_stock(num_chunks)
        return (ours, stock) if request.param == "stock receiver" else (stock, ours)

    return open_both


def cases(num_chunks: int) -> list[Any]:
    """Returns the leaves that torchft's format can carry, each with the comparisons that its format makes fail."""
    found = []
    for leaf in CARRIED:
        if not (leaf.torchft or leaf.lax) or (num_chunks and leaf.name.startswith("200 levels")):
            continue
        lax = leaf.lax
        if num_chunks and num_chunks not in leaf.torchft:
            lax |= {STORAGES, OBJECTS}
        assert num_chunks or leaf.lax or WHOLE in leaf.torchft
        found.append(pytest.param(leaf, num_chunks, lax, id=f"{leaf.name}-{num_chunks}", marks=warnings_of(leaf)))
    return found


@pytest.fixture
def group_if_needed(request: pytest.FixtureRequest) -> None:
    if request.getfixturevalue("leaf").group:
        request.getfixturevalue("process_group")


@pytest.mark.parametrize(("leaf", "num_chunks", "lax"), [*cases(0), *mostly_at_night(cases(3), by_day=0)])
@pytest.mark.usefixtures("group_if_needed")
def test_leaf_heals(
    leaf: Leaf, num_chunks: int, lax: frozenset[str], open_pair: Callable[..., tuple[Any, Any]]
) -> None:
    value = leaf.value()
    # In torchft's older pickle protocol a nested class is a call of getattr, which no allow-list can accept.
    source, target = open_pair(num_chunks, trust_pickle=leaf.trust or leaf.name == "ShardedTensor")
    source.send_checkpoint([1], 1, leaf.state(value), TIMEOUT)
    received = target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert_same_state(received, leaf.state(leaf.expect(value)), lax=lax)


def training_state() -> dict[str, Any]:
    return {
        "user": {name: CATALOGUE[name].value() for name in ("Adam.state_dict()", "StepLR.state_dict()", "Parameter")},
        "big": [torch.arange(1 << 20, dtype=torch.float32), torch.arange(1 << 20, dtype=torch.float32) * 2],
        "torchft": {"step": 5, "batches_committed": 10},
    }


@pytest.mark.parametrize(("there", "here"), [(0, 3), (3, 0), (2, 5)])
def test_our_receiver_does_not_care_how_a_stock_source_chunks(
    there: int, here: int, open_transport: Callable[..., Any], open_stock: Callable[..., Any]
) -> None:
    source, target = open_stock(there), open_transport(here)
    source.send_checkpoint([1], 5, training_state(), TIMEOUT)
    assert_same_state(target.recv_checkpoint(0, source.metadata(), 5, TIMEOUT), training_state())


def test_tensors_from_a_stock_source_are_memory_of_their_own(
    open_transport: Callable[..., Any], open_stock: Callable[..., Any]
) -> None:
    """Python shares one-byte bytes objects: tensors over them would share memory with the whole process."""
    source, target = open_stock(0), open_transport()
    empty = torch.empty(0, 3)
    sent = {"a": torch.tensor(True), "b": torch.tensor([1], dtype=torch.uint8), "empty": empty}
    source.send_checkpoint([1], 5, sent, TIMEOUT)
    received = target.recv_checkpoint(0, source.metadata(), 5, TIMEOUT)
    received["b"].fill_(65)
    assert received["a"].data_ptr() != received["b"].data_ptr()
    assert received["a"]
    assert bytes([1]) == (1).to_bytes(1, "little") == b"\x01"
    assert received["empty"].shape == (0, 3)
    # Like a tensor of torch's own, it can be resized.
    assert received["empty"].resize_(4).fill_(1.0).sum() == 4


@stock_receiver
def test_several_stock_receivers_beside_one_of_ours(
    open_transport: Callable[..., Any], open_stock: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The private copy is made into a state once for all chunks and receivers, also for one that wants the whole."""
    rebuild, calls = StateSnapshot.rebuild, []
    monkeypatch.setattr(StateSnapshot, "rebuild", lambda packed: calls.append(packed) or rebuild(packed))
    source = open_transport(4, snapshot="copy")
    targets = [open_stock(4), open_stock(4), open_transport(4), open_stock(0)]
    for step in (5, 6):
        state = training_state()
        source.send_checkpoint([1, 2, 3], step, state, TIMEOUT)
        state["big"][0].zero_()
        state["torchft"]["step"] = 0
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            metadata = source.metadata()
            for one in [pool.submit(target.recv_checkpoint, 0, metadata, step, TIMEOUT) for target in targets]:
                assert_same_state(one.result(30), training_state())
        # torchft's disallow waits for readers: a receiver must hold none of its locks once it has its state.
        source.disallow_checkpoint()
    assert len(calls) == 2


def test_states_without_bytes(open_pair: Callable[..., tuple[Any, Any]]) -> None:
    """torch 2.8 cannot read a storage without bytes, so there no torchft receiver heals from such a state."""
    source, target = open_pair(2, snapshot="copy")
    empty = {"shard": torch.empty(0, 5), "more": [torch.nn.Parameter(torch.empty(0)), 3]}
    for tensors in ({}, empty) if STOCK_READS_EMPTY else ({},):
        state = {"step": 5, "nested": {"lr": [0.1]}, **tensors}
        source.send_checkpoint([1], 1, state, TIMEOUT)
        assert_same_state(target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT), state)
        source.disallow_checkpoint()


class TestStockSource:
    def test_the_log_says_so_and_no_figures_count_it(
        self, open_transport: Callable[..., Any], open_stock: Callable[..., Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        ours, source, target = open_transport(), open_stock(), open_transport()
        for one in (ours, source):
            one.send_checkpoint([1], 5, training_state(), TIMEOUT)
        target.recv_checkpoint(0, ours.metadata(), 5, TIMEOUT)
        assert target.last_report.step == 5
        with caplog.at_level(logging.INFO, "tensorferry"):
            target.recv_checkpoint(0, source.metadata(), 5, TIMEOUT)
        assert caplog.records[-1].getMessage().startswith("received step 5 from a stock torchft source")
        assert target.last_report is None
        with urllib.request.urlopen(target.metrics_url()) as answer:
            assert 'receives_total{end="healed"} 1' in answer.read().decode()

    def test_its_pickles_are_not_trusted(
        self, open_transport: Callable[..., Any], open_stock: Callable[..., Any]
    ) -> None:
        import tensorferry

        source, target = open_stock(), open_transport()
        for name in ("dataclass", "function, module-level", "registered node"):
            source.send_checkpoint([1], 1, CATALOGUE[name].state(CATALOGUE[name].value()), TIMEOUT)
            with pytest.raises(tensorferry.errors.UnsafePickle, match="pickled_classes"):
                target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
        # torchft's source writes a second, failed answer into the body of the first.
        source.send_checkpoint([1], 1, {"f": lambda: 0, "w": torch.ones(3)}, TIMEOUT)
        with pytest.raises(tensorferry.TensorferryError):
            target.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=5))
