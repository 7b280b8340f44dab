"""The rules of a keeper without its process: what goes, what a load takes, what amounts of memory mean."""

from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tensorferry.checkpointing.keeper import limits
from tensorferry.checkpointing.keeper.choice import choose
from tensorferry.checkpointing.keeper.generations import Generations, KeeperFull
from tensorferry.checkpointing.keeper.partners import Partner
from tensorferry.checkpointing.keeper.place import SocketPlace, find_socket
from tensorferry.checkpointing.keeper.snapshot import LOCAL, Snapshot, peer_metadata, snapshot
from tensorferry.errors import InvalidArgument, ProtocolError, SystemRefused
from tensorferry.storage.commits import Commit
from tensorferry.storage.folder import Index

pytestmark = pytest.mark.process


def about(number: int, rank: int = 0, job: str = "j", origin: str = LOCAL, **fields) -> Snapshot:
    return Snapshot(
        job, f"/{job}/{number}", f"s{number}", rank, fields.pop("world_size", 4), number, number, 0, origin, **fields
    )


HERE, THERE = "0" * 16, "1" * 16


class Rig:
    """Generations, and what they have let go."""

    def __init__(self, limit: int, most: int) -> None:
        self.held = Generations[None](limit, most)
        self.evicted: list[Snapshot] = []
        self.cut: list[Snapshot] = []
        self.lingers = False

    def add(self, one: Snapshot, nbytes: int):
        self.held.make_room(one, nbytes, self._evict, self._cut)
        return self.held.add(one, nbytes, None)

    def _evict(self, kept) -> None:
        self.evicted.append(kept.about)
        self.held.leave(kept)
        if not self.lingers and not kept.lent:
            self.held.release(kept)

    def _cut(self, kept) -> None:
        self.cut.append(kept.about)
        self.held.release(kept)

    def names(self) -> list[str]:
        return [kept.about.save_id for kept in self.held]


def test_the_oldest_of_a_rank_goes_first():
    rig = Rig(100, 2)
    for number in range(4):
        rig.add(about(number), 10)
        rig.add(about(number, rank=1), 10)
    assert rig.names() == ["s2", "s2", "s3", "s3"]
    assert [one.save_id for one in rig.evicted] == ["s0", "s0", "s1", "s1"]
    assert rig.held.used == 40


def test_memory_goes_in_the_order_that_is_promised():
    rig = Rig(100, 9)
    rig.add(about(1, job="gone"), 10).live = False
    rig.add(about(2, job="copy", origin="other:1"), 10)
    rig.add(about(3, job="copy", origin="other:1"), 10)
    rig.add(about(4, job="other"), 10)
    rig.add(about(5, job="other"), 10)
    rig.add(about(6), 10)
    rig.add(about(7), 40)
    # Superseded copies, superseded snapshots, newest copies, then the newest of trainers that are gone.
    for rank, expected in enumerate(["s2", "s4", "s6", "s3", "s1"]):
        rig.add(about(10 + rank, job="new", rank=rank, world_size=9), 10)
        assert [one.save_id for one in rig.evicted[rank:]] == [expected]
    # What is the newest of a live trainer stays.
    with pytest.raises(KeeperFull, match="what it may evict for this one is not enough"):
        rig.add(about(90, job="big"), 10)
    assert rig.names()[:2] == ["s5", "s7"]


def test_a_copy_displaces_only_copies():
    rig = Rig(30, 2)
    rig.add(about(1), 10)
    rig.add(about(2), 10)
    rig.add(about(3, rank=1, origin="b:1"), 10)
    with pytest.raises(KeeperFull):
        rig.add(about(4, rank=2, origin="b:1"), 20)
    assert rig.names() == ["s1", "s2", "s3"]
    rig.add(about(4, rank=2, origin="b:1"), 10)
    assert rig.names() == ["s1", "s2", "s4"]


def test_a_rank_whose_only_snapshot_fills_the_memory_gets_a_newer_one():
    rig = Rig(10, 2)
    rig.add(about(1), 10)
    rig.add(about(2), 10)
    assert rig.names() == ["s2"]


def test_what_is_lent_counts_and_is_not_cut():
    rig = Rig(20, 1)
    first = rig.add(about(1), 10)
    first.lent = 1
    rig.add(about(2), 10)
    assert rig.held.used == 20
    with pytest.raises(KeeperFull):
        rig.add(about(3), 15)
    assert rig.names() == ["s2"]
    first.lent = 0
    rig.add(about(3), 15)
    assert [one.save_id for one in rig.cut] == ["s1"]
    assert rig.held.used == 15


def test_receivers_are_cut_only_where_their_memory_is_needed():
    rig = Rig(30, 1)
    rig.lingers = True
    rig.add(about(1), 10)
    rig.add(about(2), 10)
    rig.add(about(3), 10)
    assert rig.cut == []
    rig.add(about(4), 10)
    assert [one.save_id for one in rig.cut] == ["s1"]
    assert rig.held.used == 30


def test_a_save_is_kept_once_and_replaces_its_own_copy():
    rig = Rig(100, 5)
    rig.add(about(1, origin="b:1"), 10)
    rig.add(about(1), 10)
    assert [kept.about.origin for kept in rig.held] == [LOCAL]
    for origin in (LOCAL, "b:1"):
        with pytest.raises(KeeperFull, match="is kept already"):
            rig.add(about(1, origin=origin), 10)


def test_the_limit_holds_whatever_comes():
    chance = random.Random(5)
    rig = Rig(100, 3)
    number = 0
    for _ in range(3000):
        number += 1
        rig.lingers = chance.random() < 0.5
        one = about(
            number, rank=chance.randrange(4), job=chance.choice("ab"), origin=chance.choice([LOCAL, LOCAL, "b:1"])
        )
        before = rig.names()
        evicted = len(rig.evicted)
        try:
            kept = rig.add(one, chance.randrange(1, 120))
        except KeeperFull:
            assert rig.names() == before
            assert len(rig.evicted) == evicted
            continue
        assert rig.held.used <= 100
        kept.live = chance.random() < 0.7
        for other in rig.held:
            other.lent = chance.random() < 0.1
        for other in rig.held.leaving:
            if chance.random() < 0.5:
                rig.held.release(other)
        counts: dict[tuple, int] = {}
        for other in rig.held:
            series = other.about.series, other.about.origin
            counts[series] = counts.get(series, 0) + 1
        assert max(counts.values()) <= 3


def index(save_id: str, began: int) -> Index:
    return Index(save_id, Commit({"f": None}, began), 1, {0: ("f", None)}, {})


def test_a_load_takes_what_all_ranks_can_take():
    def chosen(known, index, world_size, *, has_name=False, location=HERE, agreed=None):
        return choose(known, index, world_size, location, has_name=has_name, agreed=agreed)

    one = about(5, complete=True, location=HERE)
    partial = about(6, location=HERE)
    # Nothing is committed: only what is complete.
    assert chosen([one, partial], None, 4) == one
    assert chosen([partial], None, 4) is None
    # The save that is committed, complete in memory or not; neither an older nor a newer one.
    assert chosen([one, partial], index("s6", 6), 4) == partial
    assert chosen([one, partial], index("s7", 7), 4) is None
    assert chosen([one, partial], index("s1", 1), 4) is None
    # A single rank may go on from what was not written any more, and never goes back.
    single = about(6, world_size=1, complete=True, location=HERE)
    assert chosen([single], index("s1", 1), 1) == single
    assert chosen([single], index("s7", 7), 1) is None
    # Another number of ranks.
    assert chosen([one], None, 2) is None
    # What is here before what a buddy has.
    there = dataclasses.replace(one, remote=True)
    assert chosen([one, there], None, 4) == one
    # On another disk it is the same job only by its name, and never newer than what is committed here.
    for has_name in (False, True):
        assert chosen([one], None, 4, has_name=has_name, location=THERE) == (one if has_name else None)
        assert chosen([single], index("s1", 1), 1, has_name=has_name, location=THERE) is None
        # The very save is the very save.
        assert chosen([single], index("s6", 6), 1, has_name=has_name, location=THERE) == single
        assert chosen([one], None, 4, has_name=has_name, location=THERE, agreed="s5") == one
        assert chosen([one], None, 4, has_name=has_name, agreed="s6") is None
        # Whatever was committed since, ranks do not load different saves.
        assert chosen([one, partial], index("s6", 6), 4, has_name=has_name, agreed="s5") == one
        assert chosen([partial], index("s6", 6), 4, has_name=has_name, agreed="s5") is None


def test_a_buddy_has_no_say_about_what_is_here():
    own = about(5, world_size=1, complete=True, location=HERE)
    newer = about(6, world_size=1, complete=True, location=HERE)
    copy = dataclasses.replace(own, origin="other:1", location=THERE)
    # A buddy may say of a snapshot that a trainer gave it, and that it is younger than all.
    lie = dataclasses.replace(own, remote=True, began=99, location=THERE)
    here = dataclasses.replace(lie, location=HERE)
    for known in itertools.permutations([own, newer, copy, lie, here]):
        assert choose(known, index("s5", 5), 1, HERE, has_name=False) == newer
        assert choose(known, index("s6", 6), 1, HERE, has_name=False) == newer
        assert choose(known, index("s5", 5), 4, HERE, has_name=False) is None
    for known in itertools.permutations([own, copy, lie, here]):
        assert choose(known, index("s5", 5), 1, HERE, has_name=False) == own
        assert choose(known, index("s6", 6), 1, HERE, has_name=False) is None
    for known in itertools.permutations([copy, lie]):
        assert choose(known, index("s5", 5), 1, HERE, has_name=False) == copy
    # Where only a buddy has it, the buddy is believed.
    assert choose([lie], index("s5", 5), 1, HERE, has_name=False) == lie


def test_a_reader_is_sent_to_what_is_here():
    own = about(5, world_size=1, location=HERE, metadata="http://a:1/own/checkpoint/")
    lie = dataclasses.replace(own, remote=True, began=99, location=THERE, metadata="http://a:1/lie/checkpoint/")
    for known in ([own, lie], [lie, own]):
        assert "own" in peer_metadata(known)
        assert "lie" not in peer_metadata(known)


def test_what_a_partner_has_copied_of_others_does_not_count(monkeypatch):
    """A list names the trainers' snapshots and the copies, and of one series there may be both."""
    held = Generations[str](limit=1000, most=2)
    keeper = SimpleNamespace(
        options=SimpleNamespace(generations=2), keeping=SimpleNamespace(generations=held), run_soon=lambda call: call()
    )
    tried: list[str] = []
    monkeypatch.setattr(Partner, "_try", lambda _, snapshot: tried.append(snapshot.save_id))
    partner = Partner("http://127.0.0.1:1/list/", cast(Any, keeper))
    own = [about(number, metadata="http://127.0.0.1:1/a/checkpoint/") for number in (1, 2, 3)]
    copy = dataclasses.replace(own[0], save_id="copied", origin="other")
    for listed in itertools.permutations([*own[1:], copy]):
        partner.listed = [own[0], *listed]
        tried.clear()
        partner._copy()
        assert sorted(tried) == ["s2", "s3"], listed


def test_amounts_of_memory(monkeypatch):
    monkeypatch.setattr(limits, "_memory_limit", lambda: 100 << 30)
    for text, expected in (
        (None, 50 << 30),
        ("1048576", 1 << 20),
        ("20G", 20 << 30),
        ("20 GiB", 20 << 30),
        ("1.5gb", 3 << 29),
        ("40%", 40 << 30),
        ("100%", 100 << 30),
        ("512M", 1 << 29),
    ):
        assert limits.memory_limit(text) == expected
    for text in (
        "",
        "G",
        "-1G",
        "1 parrot",
        "101%",
        "200G",
        "1K",
        "1e9",
        "1GG",
        "0x10",
        "nan",
        "9" * 400,
        "9" * 400 + "%",
    ):
        with pytest.raises(InvalidArgument, match="memory must be"):
            limits.memory_limit(text)
    assert limits.readable(1536 << 20) == "1.5 GiB"
    assert limits.readable(12) == "12 bytes"


def test_fields_of_a_snapshot_come_back():
    one = about(3, metadata="http://x", complete=True, remote=True, location=HERE)
    assert snapshot(one.fields()) == one
    for wrong in (None, [], {}, {**one.fields(), "rank": 1.5}):
        with pytest.raises(ProtocolError):
            snapshot(wrong)


def test_a_place_is_one_keepers(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORFERRY_KEEPER_DIR", str(tmp_path / "k"))
    assert find_socket("a") is None
    first = SocketPlace("a")
    with pytest.raises(SystemRefused, match="a keeper called 'a' runs already"):
        SocketPlace("a")
    other = SocketPlace("b")
    first.socket.touch()
    assert find_socket("a") == first.socket
    first.leave()
    first.leave()
    other.leave()
    assert list((tmp_path / "k").iterdir()) == []
    monkeypatch.setenv("TENSORFERRY_KEEPER_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(InvalidArgument, match="too long for a socket"):
        SocketPlace("a")
    monkeypatch.setenv("TENSORFERRY_KEEPER_DIR", str(tmp_path / "link"))
    (tmp_path / "link").symlink_to(tmp_path / "k")
    with pytest.raises(SystemRefused, match="folder of this user"):
        SocketPlace("a")
