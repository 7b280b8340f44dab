"""Limits and times that the documentation states are those of the code.

Each row of :data:`FIGURES` has a page, words of it, a file and the declarations that make them true. If a declaration
changes, this test names the page to change with it.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE, PYTHON = "rust/core/src/", "python/tensorferry/"
KEEPER = f"{PYTHON}checkpointing/keeper/"

FIGURES = [
    ("reference/security.md", "the last 65,536 nonces", f"{CORE}server/auth.rs", "REMEMBERED: usize = 1 << 16;"),
    ("reference/security.md", "At least 16 bytes", "rust/wire/src/proof.rs", "MIN_SECRET: usize = 16;"),
    ("reference/security.md", "up to 240 printable ASCII", f"{CORE}server/observe/metrics.rs", "SHOWN: usize = 240;"),
    ("reference/security.md", "16 connections at a time", f"{CORE}server/mod.rs", "MAX_OBSERVERS: usize = 16;"),
    ("reference/security.md", "a quarter of the 512", f"{CORE}server/config.rs", "max_connections: 512,"),
    ("reference/security.md", "a quarter of the 512", f"{CORE}server/mod.rs", "config.max_connections / 4"),
    ("reference/security.md", "for five seconds each", f"{CORE}server/connection_slots.rs", "from_secs(5);"),
    ("reference/security.md", "within half a second", f"{CORE}client/connection/connect.rs", "from_millis(500);"),
    ("reference/security.md", "a ring of 1 MiB", f"{CORE}same_host/ring.rs", "SLOT_LEN: u32 = 256 << 10;"),
    ("reference/security.md", "a ring of 1 MiB", f"{CORE}same_host/ring.rs", "SLOTS: u32 = 4;"),
    (
        "reference/protocol.md",
        "has five seconds",
        f"{CORE}server/connection_slots.rs",
        "FIRST_REQUEST: Duration = Duration::from_secs(5)",
    ),
    (
        "reference/protocol.md",
        "for two seconds",
        f"{CORE}publication/lease.rs",
        "LINGER: Duration = Duration::from_secs(2)",
    ),
    ("reference/format.md", "every 1 MiB block", "rust/wire/src/digest/mod.rs", "BLOCK_SIZE: u64 = 1 << 20;"),
    (
        "explanation/decisions.md",
        "receives of less than 16 MiB",
        f"{CORE}client/remote/mod.rs",
        "SAME_HOST_BYTES: u64 = 16 << 20;",
    ),
    ("explanation/decisions.md", "less than 750 MiB", f"{CORE}file/output.rs", "SLOWEST: u64 = 750 << 20;"),
    ("explanation/decisions.md", "up to 2 MiB ahead", f"{CORE}file/read_ahead.rs", "AHEAD: u64 = CHUNK / 2;"),
    (
        "guides/observability.md",
        "every two seconds",
        f"{CORE}server/observe/status_page.rs",
        r"\"refresh\" content=\"2\"",
    ),
    ("guides/slow-heal.md", "of two seconds or more", f"{PYTHON}net/report.py", "_LONG_S = 2.0"),
    ("guides/slow-heal.md", "a tenth of the rated speed", f"{PYTHON}net/report.py", "_SLOW = 0.1"),
    ("guides/accelerators.md", "two pinned slots of 64 MiB", f"{PYTHON}memory/bounce.py", "SLOT = 64 << 20"),
    ("guides/accelerators.md", "at most 256 MiB at a time", f"{PYTHON}dcp/load_plan.py", "_SCRATCH = 256 << 20"),
    ("guides/in-place.md", "two pinned slots of 64 MiB", f"{PYTHON}memory/bounce.py", "SLOT = 64 << 20"),
    ("guides/dcp.md", "Every 512 bytes", "rust/wire/src/digest/mod.rs", "FILE_BLOCK_SIZE: u64 = 512;"),
    ("guides/dcp.md", "Files of 64 MiB or more", f"{CORE}file/options.rs", "DIRECT_FROM: u64 = 64 << 20;"),
    ("guides/dcp.md", "an eighth of the available memory", f"{CORE}file/output.rs", "SHARE: u64 = 8;"),
    ("guides/dcp.md", "at most 256 MiB at a time", f"{PYTHON}dcp/load_plan.py", "_SCRATCH = 256 << 20"),
    ("guides/dcp.md", "and are a minute old", f"{PYTHON}storage/leftovers.py", "_GRACE_S = 60.0"),
    ("guides/dcp.md", "not been written to for a day", f"{PYTHON}storage/leftovers.py", "_ABANDONED_S = 24 * 3600.0"),
    ("guides/reshard.md", "at most 5 MiB", f"{PYTHON}dcp/torch_view.py", "_FILE_BYTES = 5 << 20"),
    ("guides/checkpointing.md", "(nice 10)", f"{PYTHON}checkpointing/writer_process.py", "_NICE = 10"),
    (
        "guides/checkpointing.md",
        "`patience` seconds (600)",
        f"{PYTHON}checkpointing/orders.py",
        "patience: float = 600.0,",
    ),
    ("guides/checkpointing.md", "waits for up to a minute", f"{PYTHON}checkpointing/saving.py", "_EXIT_WAIT_S = 60.0"),
    (
        "guides/keeper.md",
        "`--generations` snapshots of each job and rank, 2",
        f"{KEEPER}command.py",
        "type=int, default=2",
    ),
    ("guides/keeper.md", "half of the memory", f"{KEEPER}limits.py", "DEFAULT_SHARE = 0.5"),
    ("guides/keeper.md", "within two seconds", f"{KEEPER}connecting.py", "OFFER_S = 2.0"),
    ("guides/keeper.md", "takes two seconds at most", f"{KEEPER}connecting.py", "OFFER_S = 2.0"),
    ("guides/keeper.md", "for five seconds: until", f"{KEEPER}questions.py", "AT_WORK_S = 5.0"),
    ("guides/keeper.md", "five seconds for it to begin", f"{KEEPER}client.py", "_REACH_S = 5.0"),
    ("guides/keeper.md", "left two snapshots unanswered", f"{KEEPER}offers.py", "_MOST_UNANSWERED = 2"),
    ("guides/keeper.md", "for an hour", f"{KEEPER}connecting.py", '"--idle", "3600"'),
    ("guides/keeper.md", "have a minute to finish", f"{KEEPER}keeping.py", "_LINGER_S = 60.0"),
    ("guides/keeper.md", "it has five minutes", f"{KEEPER}keeping.py", "_LENT_S = 300.0"),
    ("guides/keeper.md", "run at nice 5", f"{KEEPER}own_process.py", "_NICE = 5"),
    ("guides/keeper.md", "buddies every second", f"{KEEPER}partners.py", "_INTERVAL_S = 1.0"),
    ("guides/keeper.md", "may take ten minutes", f"{KEEPER}partners.py", "_FETCH_S = 600.0"),
    ("guides/keeper.md", "at least every 30 seconds", f"{KEEPER}partners.py", "_LONGEST_INTERVAL_S = 30.0"),
    ("guides/keeper.md", "wait three seconds for the list", f"{KEEPER}partners.py", "_ASK_S = 3.0"),
    ("guides/keeper.md", "one second if it did not", f"{KEEPER}partners.py", "_ASK_AGAIN_S = 1.0"),
]


@pytest.mark.parametrize(("page", "words", "file", "declared"), FIGURES)
def test_a_figure_is_that_of_the_code(page, words, file, declared):
    text = re.sub(r"\s+", " ", (ROOT / "docs" / page).read_text())
    assert words in text, f"docs/{page} does not say this any more: take the row out, or put the new words there"
    assert declared in (ROOT / file).read_text(), f"{file} has another value: docs/{page} says {words!r}"
