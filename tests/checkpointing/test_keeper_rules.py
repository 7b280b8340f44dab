"""The rules of a keeper without its process: what goes, what a load takes, what options and messages mean."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from tensorferry.checkpointing.keeper import limits
from tensorferry.checkpointing.keeper.buddies import keeper_url, newest_of_trainers
from tensorferry.checkpointing.keeper.generations import Generations, KeeperFull
from tensorferry.checkpointing.keeper.place import SocketPlace, find_socket
from tensorferry.checkpointing.keeper.snapshot import (
    LOCAL,
    Snapshot,
    choose,
    location_of,
    peer_metadata,
    snapshot,
)
from tensorferry.errors import IncompleteCheckpoint, InvalidArgument, ProtocolError, SystemRefused
from tensorferry.net.network import Network
from tensorferry.storage.commits import Commit
from tensorferry.storage.folder import Index

HERE, THERE = "0" * 16, "1" * 16


def about(number: int, rank: int = 0, job: str = "j", origin: str = LOCAL, **fields) -> Snapshot:
    world_size, path = fields.pop("world_size", 4), fields.pop("path", f"/{job}/{number}")
    return Snapshot(job, path, f"s{number}", rank, world_size, number, number, 0, origin, **fields)


class Rig:
    """Generations, and what they have let go."""

    def __init__(self, limit: int, most: int) -> None:
        self.held = Generations[None](limit, most)
        self.evicted: list[str] = []
        self.cut: list[str] = []
        self.lingers = False

    def add(self, one: Snapshot, nbytes: int):
        self.held.make_room(one, nbytes, self._evict, self._cut)
        return self.held.add(one, nbytes, None)

    def _evict(self, kept) -> None:
        self.evicted.append(kept.about.save_id)
        self.held.leave(kept)
        if not self.lingers and not kept.lent:
            self.held.release(kept)

    def _cut(self, kept) -> None:
        self.cut.append(kept.about.save_id)
        self.held.release(kept)

    def names(self) -> list[str]:
        return [kept.about.save_id for kept in self.held]


def test_the_oldest_of_a_rank_goes_first():
    rig = Rig(100, 2)
    for number in range(4):
        rig.add(about(number), 10)
        rig.add(about(number, rank=1), 10)
    assert (rig.names(), rig.evicted) == (["s2", "s2", "s3", "s3"], ["s0", "s0", "s1", "s1"])
    assert rig.held.used == 40
    # Of copies, which are fetched in any order, that of the oldest save.
    rig = Rig(100, 2)
    for number in (2, 1, 3):
        rig.add(about(number, origin="b:1"), 10)
    assert rig.names() == ["s2", "s3"]
    # Jobs of the same path in folders of their own do not evict each other, unless they have one name.
    for job, expected in (("/run", 2), ("name", 1)):
        rig = Rig(100, 1)
        for number, location in enumerate((HERE, THERE)):
            rig.add(about(number, job=job, path="/run/1", location=location), 10)
        assert len(rig.names()) == expected


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
        assert rig.evicted[rank:] == [expected]
    # What is the newest of a live trainer stays.
    with pytest.raises(KeeperFull, match="does not fit beside"):
        rig.add(about(90, job="big"), 10)
    assert rig.names()[:2] == ["s5", "s7"]
    # A rank whose only snapshot fills the memory gets a newer one.
    rig = Rig(10, 2)
    rig.add(about(1), 10)
    rig.add(about(2), 10)
    assert rig.names() == ["s2"]


def test_a_copy_displaces_only_copies_and_a_save_its_own_copy():
    rig = Rig(30, 2)
    rig.add(about(1), 10)
    rig.add(about(2), 10)
    rig.add(about(3, rank=1, origin="b:1"), 10)
    with pytest.raises(KeeperFull):
        rig.add(about(4, rank=2, origin="b:1"), 20)
    assert rig.names() == ["s1", "s2", "s3"]
    rig.add(about(4, rank=2, origin="b:1"), 10)
    assert rig.names() == ["s1", "s2", "s4"]
    rig.add(about(4, rank=2), 10)
    assert [kept.about.origin for kept in rig.held] == [LOCAL] * 3
    for origin in (LOCAL, "b:1"):
        with pytest.raises(KeeperFull, match="is kept already"):
            rig.add(about(4, rank=2, origin=origin), 10)


def test_what_is_lent_counts_and_receivers_are_cut_only_where_their_memory_is_needed():
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
    assert (rig.cut, rig.held.used) == (["s1"], 15)
    rig = Rig(30, 1)
    rig.lingers = True
    for number in range(1, 4):
        rig.add(about(number), 10)
    assert rig.cut == []
    rig.add(about(4), 10)
    assert (rig.cut, rig.held.used) == (["s1"], 30)


def test_the_limit_holds_whatever_comes():
    chance = random.Random(5)
    rig = Rig(100, 3)
    for number in range(3000):
        rig.lingers = chance.random() < 0.5
        origin = chance.choice([LOCAL, LOCAL, "b:1"])
        one = about(number, rank=chance.randrange(4), job=chance.choice("ab"), origin=origin)
        before = rig.names(), len(rig.evicted)
        rig.held.promised = {"buddy": chance.choice([0, 0, 30])} if rig.held.used < 60 else {}
        try:
            kept = rig.add(one, chance.randrange(1, 120))
        except KeeperFull:
            assert (rig.names(), len(rig.evicted)) == before
            continue
        assert rig.held.used <= 100
        kept.live = chance.random() < 0.7
        for other in rig.held:
            other.lent = chance.random() < 0.1
        for other in [*rig.held.leaving]:
            if chance.random() < 0.5:
                rig.held.release(other)
        series = [(other.about.series, other.about.origin) for other in rig.held]
        assert max(map(series.count, series)) <= 3


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
    assert chosen([single], index("s7", 6), 1) is None
    # Another number of ranks.
    assert chosen([one], None, 2) is None
    # In another folder it is the same job only by its name, and never newer than what is committed here.
    for has_name in (False, True):
        assert chosen([one], None, 4, has_name=has_name, location=THERE) == (one if has_name else None)
        assert chosen([single], index("s1", 1), 1, has_name=has_name, location=THERE) is None
        # The very save is the very save.
        assert chosen([single], index("s6", 6), 1, has_name=has_name, location=THERE) == single
        # Whatever was committed since, ranks do not load different saves.
        assert chosen([one], None, 4, has_name=has_name, location=THERE, agreed="s5") == one
        assert chosen([one, partial], index("s6", 6), 4, has_name=has_name, agreed="s5") == one
        assert chosen([partial], index("s6", 6), 4, has_name=has_name, agreed="s5") is None


def test_a_buddy_has_no_say_about_what_is_here():
    fields = {"world_size": 1, "complete": True, "location": HERE, "metadata": "http://a:1/own/checkpoint/"}
    own, newer = about(5, **fields), about(6, **fields)
    copy = dataclasses.replace(own, origin="other:1", location=THERE)
    # A buddy may say of a snapshot that a trainer gave it, and that it is younger than all.
    lie = dataclasses.replace(own, remote=True, began=99, location=THERE, metadata="http://a:1/lie/checkpoint/")
    here = dataclasses.replace(lie, location=HERE)
    for known in itertools.permutations([own, newer, copy, lie, here]):
        assert choose(known, index("s5", 5), 1, HERE, has_name=False) == newer
    for known in itertools.permutations([own, copy, lie, here]):
        assert choose(known, index("s5", 5), 1, HERE, has_name=False) == own
        assert choose(known, index("s6", 6), 1, HERE, has_name=False) is None
        assert "own" in peer_metadata(known)
    for known in itertools.permutations([copy, lie]):
        assert choose(known, index("s5", 5), 1, HERE, has_name=False) == copy
    # Where only a buddy has it, the buddy is believed.
    assert choose([lie], index("s5", 5), 1, HERE, has_name=False) == lie


def test_metadata_for_a_reader_is_that_of_the_newest_whole_save_of_one_job():
    def served(number: int, rank: int, job: str = "j") -> Snapshot:
        return about(number, rank, job, world_size=2, metadata=f"http://{job}:1/{number}{rank}/checkpoint/")

    whole = [served(1, 1), served(1, 0), served(2, 0), served(2, 1), served(3, 0)]
    assert peer_metadata(whole).split()[1:] == ["2", "http://j:1/20/checkpoint/", "http://j:1/21/checkpoint/"]
    with pytest.raises(IncompleteCheckpoint, match="all ranks"):
        peer_metadata(whole[-1:])
    both = [*whole, served(1, 0, "k"), served(1, 1, "k")]
    with pytest.raises(InvalidArgument, match="of several jobs, j, k"):
        peer_metadata(both)
    assert "http://k:1/10/" in peer_metadata(both, job="k")


def test_a_location_is_a_folder_of_this_machine(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    found = location_of(tmp_path / "a" / "1")
    assert found == location_of(tmp_path / "a" / "2") == location_of(tmp_path / "link" / "1")
    missing = location_of(tmp_path / "b" / "c" / "1")
    (tmp_path / "b").mkdir()
    others = [location_of(tmp_path / name / "1") for name in ("b", "b/c", "b/d")]
    (tmp_path / "a").rename(tmp_path / "old")
    (tmp_path / "a").mkdir()
    assert len({found, missing, *others, location_of(tmp_path / "a" / "1")}) == 6
    assert location_of(tmp_path / "old" / "1") == found


def test_what_a_buddy_has_copied_of_others_does_not_count():
    """A list names the trainers' snapshots and the copies, and of one series there may be both."""
    own = [about(number, metadata="http://127.0.0.1:1/a/checkpoint/") for number in (1, 2, 3)]
    copy = dataclasses.replace(own[0], save_id="copied", origin="other")
    for listed in itertools.permutations([*own[1:], copy]):
        assert {one.save_id for one in newest_of_trainers([own[0], *listed], 2)} == {"s2", "s3"}


PIN = f"sha256-{'a' * 64}"


@pytest.mark.parametrize(
    ("address", "tls", "secret", "expected"),
    [
        ("node2:7070", False, True, "http://node2:7070/keeper/checkpoint/"),
        (f"https://{PIN}@node2:7070", True, True, f"https://{PIN}@node2:7070/keeper/checkpoint/"),
        (f"https://{PIN}@node2:7070/keeper/checkpoint/", True, True, f"https://{PIN}@node2:7070/keeper/checkpoint/"),
        ("node2:7070", False, False, "set TENSORFERRY_SECRET or TENSORFERRY_SECRET_FILE"),
        ("node2:7070", True, True, "sha256-FINGERPRINT"),
        ("https://node2:7070", True, True, "sha256-FINGERPRINT"),
        ("node2", False, True, "is not the address of a buddy"),
    ],
)
def test_addresses_of_buddies(address, tls, secret, expected):
    options = Network(secret="sixteen characters or more" if secret else None, tls=tls)
    if expected.startswith("http"):
        assert keeper_url(address, options) == expected
        return
    with pytest.raises(InvalidArgument, match=expected):
        keeper_url(address, options)


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
    ):
        assert limits.memory_limit(text) == expected
    for text in ("", "G", "-1G", "1 parrot", "101%", "200G", "1K", "1e9", "1GG", "0x10", "nan", "9" * 400 + "%"):
        with pytest.raises(InvalidArgument, match="memory must be"):
            limits.memory_limit(text)
    assert (limits.readable(1536 << 20), limits.readable(12)) == ("1.5 GiB", "12 bytes")


def test_fields_of_a_snapshot_come_back_and_wrong_ones_are_named():
    one = about(3, job="/j", metadata="http://x", complete=True, remote=True, location=HERE)
    assert snapshot(one.fields()) == one
    for wrong in (
        {"rank": 4}, {"rank": -1}, {"rank": "0"}, {"rank": 1.5}, {"world_size": 0}, {"world_size": 1 << 40},
        {"save_id": ""}, {"save_id": "a/b"}, {"save_id": None}, {"path": ""}, {"path": "x" * 9000}, {"path": "a\nb"},
        {"path": "relative/1"}, {"job": "\u00e9" * 3000}, {"job": 7}, {"step": 1 << 70}, {"step": "1"},
        {"began": "now"}, {"began": 1e300}, {"began": 1 << 63}, {"location": None}, {"nbytes": -1},
    ):  # fmt: skip
        with pytest.raises(ProtocolError, match=next(iter(wrong))):
            snapshot(one.fields() | wrong)
    for nothing in (None, [], {}, 7):
        with pytest.raises(ProtocolError):
            snapshot(nothing)


def test_a_place_is_one_keepers(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORFERRY_KEEPER_DIR", str(tmp_path / "k"))
    assert find_socket("a") is None
    first, other = SocketPlace("a"), SocketPlace("b")
    with pytest.raises(SystemRefused, match="a keeper called 'a' runs already, process"):
        SocketPlace("a")
    first.socket.touch()
    assert find_socket("a") == first.socket
    first.leave()
    first.leave()
    assert find_socket("a") is None
    other.leave()
    SocketPlace("a").leave()
    monkeypatch.setenv("TENSORFERRY_KEEPER_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(InvalidArgument, match="too long for a socket"):
        SocketPlace("a")
    # Where others may enter, nobody listens and nobody asks.
    (tmp_path / "link").symlink_to(tmp_path / "k")
    (tmp_path / "open").mkdir(mode=0o755)
    for wrong in ("link", "open"):
        monkeypatch.setenv("TENSORFERRY_KEEPER_DIR", str(tmp_path / wrong))
        for use in (SocketPlace, find_socket):
            with pytest.raises(SystemRefused, match="folder of this user"):
                use("a")
