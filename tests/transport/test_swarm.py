"""Receivers that send each other what they have."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from exchange import figure

if TYPE_CHECKING:
    pass

BLOCK = 1 << 20
BLOCKS = 48
SLOW = 16 * BLOCK
TIMEOUT = timedelta(seconds=100)
OPTIONS: dict[str, Any] = {"interface": "127.0.0.1", "same_host": False, "relay": True}

pytestmark = [pytest.mark.timeout(180), pytest.mark.beyond_torchft]


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {"w": torch.randint(0, 255, (BLOCKS * BLOCK,), dtype=torch.uint8)}


@pytest.mark.waits
def test_four_receivers_take_little_more_than_one_copy(open_transport: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tensorferry")
    source, values = open_transport(max_bandwidth=SLOW, **OPTIONS), state()
    source.send_checkpoint([1], 7, values, TIMEOUT)
    members = [open_transport(2, **OPTIONS) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        began = [pool.submit(member.recv_checkpoint, 0, source.metadata(), 7, TIMEOUT) for member in members]
        assert all(torch.equal(one.result()["w"], values["w"]) for one in began)
    total, sent = BLOCKS * BLOCK, source._server.bytes_served
    assert sent < 2.5 * total, f"{sent / total} copies have left the source"
    reports = [member.last_report for member in members]
    relayed = sum(report.relayed_bytes for report in reports)
    assert relayed > 1.5 * total
    assert all(report.relays <= 3 and report.refused_blocks == 0 for report in reports)
    assert all(f" bytes from the source and {report.relayed_bytes} from " in caplog.text for report in reports)
    assert sum(figure(member, "relayed_bytes_total") for member in members) >= 0.9 * relayed
    # Nothing is read once a receive has returned, so the source withdraws at once.
    source.disallow_checkpoint()


@pytest.mark.parametrize(
    ("options", "values"),
    [({"same_host": True}, None), ({}, {"w": torch.arange(1000.0)})],
    ids=["shared memory", "a small state"],
)
def test_what_takes_no_part_says_nothing(
    options: dict[str, Any], values: Any, open_transport: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source, healing = (open_transport(**OPTIONS | options) for _ in range(2))
    values = values or state()
    source.send_checkpoint([1], 7, values, TIMEOUT)
    with caplog.at_level("WARNING"):
        assert torch.equal(healing.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)["w"], values["w"])
    assert not caplog.records
    assert figure(source, "swarm_members") == 0
    assert healing.last_report.relays == 0


@pytest.mark.waits
@pytest.mark.parametrize(
    ("options", "bandwidth", "expected"),
    [
        ({"tls": True}, SLOW, 1),
        ({"secret": "at least sixteen bytes"}, SLOW, 1),
        # Unasked, where the source is slow.
        ({"relay": None}, SLOW, 1),
        ({"relay": False}, SLOW, 0),
    ],
)
def test_who_takes_part(options: dict[str, Any], bandwidth: int | None, expected: int, open_transport: Any) -> None:
    seen: list[float] = []
    chosen = OPTIONS | options
    source = open_transport(**chosen, max_bandwidth=bandwidth)
    healing = open_transport(**chosen, progress=lambda *_: seen.append(figure(source, "swarm_members")))
    source.send_checkpoint([1], 7, state(), TIMEOUT)
    healing.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)
    assert max(seen) == expected
