"""Makes the frameworks importable that ``make build`` puts beside the packages of ``.venv``."""

from __future__ import annotations

import sys

from framework_ranks import FRAMEWORKS

if FRAMEWORKS.is_dir():
    sys.path.append(str(FRAMEWORKS))
