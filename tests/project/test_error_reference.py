"""docs/reference/errors.md lists every class of error, and every error that the code raises is in one of its tables."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tensorferry import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/errors.md").read_text()
#: The classes of the engine's errors, as `rust/py/src/errors.rs` maps them.
KINDS = {
    "Timeout": "FetchTimeout",
    "Connect": "ConnectError",
    "Unproven": "UnprovenSource",
    "Corrupt": "CorruptCheckpoint",
    "Torn": "TornCheckpoint",
    "Changed": "SourceChanged",
    "Cancelled": "TransferCancelled",
    "Invalid": "InvalidArgument",
    "System": "SystemRefused",
    "Foreign": "ProtocolError",
    "Protocol": "ProtocolError",
}
CLASSES = sorted(set(errors.__all__) - {"TensorferryError"})


def listed() -> dict[str, list[str]]:
    """Returns the messages of each class as the tables have them."""
    found: dict[str, list[str]] = {}
    _, _, section = PAGE.partition("\n## Messages\n")
    for title, body in re.findall(r"^### ([^\n]*)\n(.*?)(?=^##|\Z)", section, re.M | re.S):
        rows = re.findall(r"^\| (`[^|]*`) \| [^|]+ \| [^|]+ \|$", body, re.M)
        messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
        found |= dict.fromkeys(re.findall(r"\w+(?=,| and|$)", title), messages)
    return found


LISTED = listed()


def pattern(message: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)


def text(node: ast.expr) -> str:
    """Returns what is constant in a message."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text(value) for value in values)
        case ast.BinOp(left=left, right=right):
            return text(left) + text(right)
        case ast.IfExp(body=body, orelse=other):
            return f"{text(body)} / {text(other)}"
    return "…"


def raised_in_python() -> dict[str, set[str]]:
    found = defaultdict(set)
    for path in (ROOT / "python/tensorferry").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in errors.__all__:
                found[node.func.id] |= {text(argument) for argument in node.args}
    return found


def raised_in_rust() -> dict[str, set[str]]:
    found = defaultdict(set)
    for path in (ROOT / "rust/core/src").rglob("*.rs"):
        code = re.sub(r"^\s*//.*$", "", path.read_text().partition("#[cfg(test)]")[0], flags=re.M)
        for kind, message in re.findall(
            r'Error::(?:new|caused)\(\s*ErrorKind::(\w+),\s*(?:format!\(\s*)?"((?:[^"\\]|\\.)*)"', code
        ):
            found[KINDS[kind]].add(re.sub(r"\\\n\s*", "", message))
        # Where the kind is a variable, it is that of an answer's status.
        answers = re.findall(r'Error::new\(kind, format!\("((?:[^"\\]|\\.)*)"', code)
        found["SourceRefused"] |= {re.sub(r"\\\n\s*", "", message) for message in answers}
    return found


@functools.cache
def raised() -> list[tuple[str, str]]:
    """Returns the class and the message of each error."""
    return [
        (name, message)
        for found in (raised_in_python(), raised_in_rust())
        for name, messages in found.items()
        for message in messages
        # What is only put together from other texts has no words of its own.
        if name != "TensorferryError" and len(re.findall(r"[a-z]{2,}", re.sub(r"\{[^}]*\}", "", message))) > 1
    ]


def test_the_messages_of_each_class_are_listed():
    assert LISTED.keys() | {"TensorferryError"} == set(errors.__all__)
    assert len(raised()) > 300
    assert {name for name, _ in raised()} <= set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_every_message_is_in_a_table(name: str):
    patterns = [pattern(message) for message in LISTED.get(name, [])]
    missing = [message for of, message in raised() if of == name and not any(one.search(message) for one in patterns)]
    assert missing == [], f"docs/reference/errors.md has no row for these messages of {name}, with … for what varies"


def test_no_message_is_listed_twice_for_a_class():
    twice = {
        name: [message for message, times in Counter(messages).items() if times > 1]
        for name, messages in LISTED.items()
    }
    assert {name: messages for name, messages in twice.items() if messages} == {}


def test_every_listed_message_exists():
    sources = [*(ROOT / "python/tensorferry").rglob("*.py"), *(ROOT / "rust").glob("*/src/**/*.rs")]
    # Texts go on over the ends of lines: in Python as several strings, in Rust behind a backslash.
    code = "\n".join(re.sub(r'"\s*\n\s*f?"|\\\n\s*', "", path.read_text()) for path in sources)
    code = re.sub(r"\{[^{}\n]*\}", "…", code)
    listed = {message for messages in LISTED.values() for message in messages}
    gone = []
    for message in sorted(listed):
        parts = [part for part in (part.strip() for part in message.split("…")) if part]
        if not all(part in code for part in parts):
            gone.append(message)
    assert gone == []
