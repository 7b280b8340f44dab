"""Takes the marks of code blocks away (``python needs=torchft``), which are for tests/project/test_examples_in_docs.py.

A block that is a file of the reader's (``python file=trainer.py``) keeps its name as a title.
"""

from __future__ import annotations

import re
from typing import Any

_FENCE = re.compile(r"^```(?P<language>\w+) (?P<mark>.+)$", re.MULTILINE)


def _shown(fence: re.Match[str]) -> str:
    name = fence["mark"].removeprefix("file=")
    return f"```{fence['language']}" + (f' title="{name}"' if name != fence["mark"] else "")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Called by MkDocs for each page, before it is rendered."""
    del kwargs
    return _FENCE.sub(_shown, markdown)
