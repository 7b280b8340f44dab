"""Checkpoints in object stores: ours beside DCP on s3fs, s3torchconnector, and obstore by hand.

The same states, the same server, the same minutes: every measurement is made by fresh processes, contenders take turns
within a round, forwards in even rounds and backwards in odd ones, and the table gives medians. A save ends when the
store has said that all is there; loads go into tensors that exist, and what they hold is compared. Imports, and a
first small save and load, come before.

    ranks     tensors that are spread over 8 ranks, each of which saves and loads its own parts
    small     many tensors of 1 KiB, one rank
    eighth    one rank has saved, and each of 8 loads an eighth of each tensor: `moved` is what the store has sent for
              each byte that was wanted

"obstore by hand" is the bare parallel client: 8 threads of each rank put straight pieces of 8 MiB, each an object of
its own, without a list of them, a checksum, or a commit. `SyncCheckpointer` is ours without torch's planner, which is
slow where tensors are small. The servers are s3s-fs (`make object-stores`), which writes to the disk, and one of
this bench's own that keeps objects in memory (`object_memory.py`). A third part has server and client on a link
of 1 Gbit/s, between network namespaces; `line` is the share of the link's rate, less the headers of TCP's packets of
1500 bytes, at which the state has come or gone; that part needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet import Network, NotPermitted
from machine import facts, others_busy
from object_memory import PORT
from object_ranks import BARE, BLOCK, BLOCKS, CHECKPOINTER, KINDS, MIB, OURS, Rank
from report import end, ratio, spread_text

sys.path += [str(Path(__file__).parents[1] / below) for below in ("examples/reshard", "tests/support")]
from ranks import Job, RankFailed

from stores import BUCKET, environment, s3s, s3s_binary

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER = Path(__file__).with_name("object_memory.py")
#: How many ranks save, and how many load.
ROWS = {"ranks": (BLOCKS, BLOCKS), "small": (1, 1), "eighth": (1, BLOCKS)}
SERVERS = ("s3s-fs", "memory", "link")
#: Contenders that take turns on the link, where the others would take minutes.
_ON_LINK = (OURS, BARE)
_PATIENCE_S = 600
#: The share of a packet's bytes on the link that TCP carries.
_PAYLOAD = 1448 / 1514


class NoServer(Exception):
    """A server cannot be had here."""


@contextlib.contextmanager
def in_memory(mib: int) -> Iterator[str]:
    """Yields the address of the server that keeps objects in memory, of which it has touched so much."""
    command = [sys.executable, str(SERVER), "127.0.0.1", str(mib), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


@contextlib.contextmanager
def on_disk(folder: Path) -> Iterator[str]:
    """Yields the address of s3s-fs."""
    if s3s_binary() is None:
        raise NoServer("s3s-fs is not there: make object-stores builds it")
    with s3s(folder) as url:
        yield url


def _sent(url: str) -> int | None:
    """Returns the bytes of bodies that the server in memory has sent; nothing for another one."""
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(f"{url}/-/figures", timeout=60) as answer:
        return int(json.load(answer).get("sent", 0))
    return None


def measure(url: str, row: str, kind: str, count: int, place: str) -> dict[str, Any]:
    """Saves and loads once, by fresh processes; returns the costs, or why there are none."""
    # As the bare client: without TLS, bodies would be signed.
    around = environment(url) | {"AWS_ALLOW_HTTP": "true", "AWS_UNSIGNED_PAYLOAD": "true"}
    (saves, loads) = ROWS[row]
    with Job("the saving job", saves, Rank, _PATIENCE_S) as saving:
        if (why := saving("open", kind, around, f"{place}-warm-save")[0]) is not None:
            return {"skipped": why}
        nbytes = sum(saving("build", row, count, 1))
        saved = saving("save", place)
    with Job("the loading job", loads, Rank, _PATIENCE_S) as loading:
        loading("open", kind, around, f"{place}-warm-load")
        wanted = sum(loading("build", row, count, 1))
        loading("clear")
        before = _sent(url)
        loaded = loading("load", place)
        after = _sent(url)
        equal = all(loading("equals", row, count, 1))
    sample = {"bytes": nbytes, "equal": equal}
    if before is not None and after is not None:
        sample["moved"] = (after - before) / wanted
    for what, told in (("save", saved), ("load", loaded)):
        sample |= {f"{what}_s": max(one["s"] for one in told), f"{what}_cpu": sum(one["cpu"] for one in told)}
        sample[f"{what}_extra"] = sum(one["extra"] for one in told)
    return sample


def rounds(url: str, server: str, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Measures all rows and contenders with one server, in turns."""
    for row in options.rows.split(","):
        count = options.tensors if row == "small" else max(1, options.mib * MIB // (BLOCK * BLOCKS))
        # By hand, nobody knows where an eighth is; and torch's checkpointers are about a whole rank each.
        kinds = [kind for kind in options.kinds.split(",") if row == "small" or kind != CHECKPOINTER]
        kinds = [kind for kind in kinds if row != "eighth" or kind != BARE]
        for number in range(options.rounds):
            for kind in kinds[::-1] if number % 2 else kinds:
                about = f"{server}, {row}, {kind}"
                place = f"s3://{BUCKET}/{row}-{kind.replace(' ', '-')}-{number}"
                try:
                    sample = measure(url, row, kind, count, place)
                    if not sample.get("equal", True):
                        results["problems"].append(f"{about}: what was loaded differs")
                except RankFailed as e:
                    sample = {"error": str(e)}
                    results["problems"].append(f"{about}: {e}")
                if "skipped" in sample and not number:
                    print(f"SKIPPED: {about}: {sample['skipped']}", flush=True)
                results["samples"].append({"server": server, "row": row, "kind": kind, "round": number, **sample})
                print(f"round {number + 1}, {about}", file=sys.stderr, flush=True)
                empty(url)


def empty(url: str) -> None:
    """Removes all objects, so that neither memory nor disk fills."""
    import obstore
    from obstore.store import from_url

    keys = environment(url)
    store = from_url(
        f"s3://{BUCKET}",
        endpoint=keys["AWS_ENDPOINT_URL"],
        access_key_id=keys["AWS_ACCESS_KEY_ID"],
        secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        region=keys["AWS_REGION"],
        client_options={"allow_http": True},
    )
    for chunk in obstore.list(store):
        obstore.delete(store, [meta["path"] for meta in chunk])


def on_link(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Measures on a shaped link: the same program runs once more, in the namespace of the client."""
    network = Network(options.mbit, SERVER)
    kinds = [kind for kind in _ON_LINK if kind in options.kinds.split(",")]
    try:
        # Both hosts run the server, and the second one is the client's.
        network.build(2, options.link_mib)
        server, client = network.hosts
        found = options.folder / "link.json"
        command = ["ip", "netns", "exec", client.name, sys.executable, __file__, "--json", str(found)]
        command += ["--server", f"http://{server.address}:{PORT}", "--rows", "ranks", "--mib", str(options.link_mib)]
        command += ["--rounds", str(options.rounds), "--kinds", ",".join(kinds), "--folder", str(options.folder)]
        done = subprocess.run(command, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, check=False)
        told = json.loads(found.read_text())
        results["samples"] += [{**sample, "server": "link"} for sample in told["samples"]]
        results["problems"] += told["problems"]
        if done.returncode and not told["problems"]:
            results["problems"].append(f"link: the client has ended with {done.returncode}")
    finally:
        network.remove()


def as_text(results: dict[str, Any]) -> str:
    """Returns the tables: one for each server and row."""
    lines = []
    good = [s for s in results["samples"] if "save_s" in s]
    for server, row in dict.fromkeys((s["server"], s["row"]) for s in good):
        here = [s for s in good if (s["server"], s["row"]) == (server, row)]
        lines += [
            "",
            f"{server}, {row}: {here[0]['bytes'] / MIB:.0f} MiB, ranks {ROWS[row][0]} -> {ROWS[row][1]}; medians "
            "(lowest-highest)",
            "",
            "| | save GB/s | ours / it | CPU s/GB | load GB/s | ours / it | CPU s/GB | moved | line, save | load |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for kind in dict.fromkeys(s["kind"] for s in here):
            cells = [kind]
            mine = [s for s in here if s["kind"] == kind]
            for what in ("save", "load"):
                times = {name: {s["round"]: s[f"{what}_s"] for s in here if s["kind"] == name} for name in (OURS, kind)}
                faster = ratio(times[kind], times[OURS])
                cells += [
                    spread_text([s["bytes"] / s[f"{what}_s"] / 1e9 for s in mine]),
                    "-" if faster is None else "{median:.2f} ({low:.2f}-{high:.2f})".format(**faster),
                    spread_text([s[f"{what}_cpu"] / s["bytes"] * 1e9 for s in mine], 2),
                ]
            cells.append(spread_text([s["moved"] for s in mine if "moved" in s]))
            for what in ("save", "load"):
                rates = [s["bytes"] * 8e-6 / s[f"{what}_s"] for s in mine if server == "link"]
                cells.append(spread_text([rate / results["mbit"] / _PAYLOAD for rate in rates]))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the bench; 0 also where a part of it cannot run, which it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("build/bench/objects.json"), help="samples")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="where s3s-fs keeps objects")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated contenders")
    parser.add_argument("--servers", default=",".join(SERVERS), help="comma-separated")
    parser.add_argument("--mib", type=int, default=1024, help="size of the large state; a multiple of 64")
    parser.add_argument("--tensors", type=int, default=100_000, help="how many small ones")
    parser.add_argument("--mbit", type=int, default=1000, help="speed of the link")
    parser.add_argument("--link-mib", type=int, default=1024, help="size of the state on the link")
    parser.add_argument("--small", action="store_true", help="a trial: 128 MiB, 10,000 tensors, one round")
    parser.add_argument("--server", help="the URL of a server that runs already, in place of those of the bench")
    options = parser.parse_args()
    if options.small:
        options.mib, options.tensors, options.rounds, options.link_mib = 128, 10_000, 1, 64
    for name in {*options.kinds.split(",")} - {*KINDS}:
        parser.error(f"no such contender: {name}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "version": 1,
        "machine": facts(),
        "others_busy": others_busy(),
        "mbit": options.mbit,
        "samples": [],
        "problems": [],
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in [options.server] if options.server else options.servers.split(","):
            try:
                if options.server:
                    rounds(options.server, "given", options, results)
                elif name == "link":
                    on_link(options, results)
                else:
                    opened = in_memory(2 * options.mib) if name == "memory" else on_disk(Path(folder).resolve())
                    with opened as url:
                        rounds(url, name, options, results)
            except (NoServer, NotPermitted) as e:
                print(f"SKIPPED: {name}: {e}", flush=True)
                results["samples"].append({"server": name, "skipped": str(e)})
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    if not options.server:
        print(as_text(results))
    return end(results["problems"])


if __name__ == "__main__":
    sys.exit(main())
