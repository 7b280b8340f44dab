"""Turns what docstrings write for readers of the code into Markdown: roles, double backticks and the names of pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
_PAGE = re.compile(r"docs/([\w/-]+)\.md")


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        del kwargs
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value).replace("``", "`")
            # The pages of the API are in docs/reference/.
            obj.docstring.value = _PAGE.sub(r"[the documentation](../\1.md)", text)
