"""docs/reference/log.md has every line that the package logs at WARNING and above."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/tensorferry"
PAGE = (ROOT / "docs/reference/log.md").read_text()
LEVELS = {"warning", "error", "exception", "critical", "log"}
#: What is logged as it comes from elsewhere, and the row that has it.
ELSEWHERE = {
    "checkpointing/keeper/offers.py": "this trainer has … shared secret",
    "dcp/failures.py": "torch.distributed sends objects between ranks through NumPy",
    "megatron/serialization.py": "torch.distributed sends objects between ranks through NumPy",
    "pickles/allowlist.py": "will refuse",
}


def listed() -> list[str]:
    rows = re.findall(r"^\| (`.*?`) \| [^|]+ \|$", PAGE, re.M)
    return [line for row in rows for line in re.findall(r"`([^`]+)`", row)]


def logged() -> dict[str, str | None]:
    """Returns each call's place, and its text with all that is filled in as …; None if it is no constant."""
    found: dict[str, str | None] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="logger"), attr=level)) if level in LEVELS:
                    text = node.args[1 if level == "log" else 0]
                    constant = isinstance(text, ast.Constant) and text.value != "%s"
                    shown = re.sub(r"%[.*\d]*[a-z]", "…", text.value) if constant else None  # type: ignore[attr-defined]
                    found[f"{path.relative_to(PACKAGE)}:{node.lineno}"] = shown
    return found


def test_every_line_is_in_the_page_and_every_row_is_logged() -> None:
    patterns = {line: re.compile(".*".join(map(re.escape, line.split("…"))), re.DOTALL) for line in listed()}
    assert len(patterns) == len(listed()), "no line is listed twice"
    used = set()
    for place, text in logged().items():
        if text is None:
            rows = [ELSEWHERE[place.partition(":")[0]]]
            assert rows[0] in patterns, place
        else:
            rows = [line for line, pattern in patterns.items() if pattern.search(text)]
        assert rows, f"{place}: {text}"
        used.update(rows)
    assert set(patterns) - used == set()
