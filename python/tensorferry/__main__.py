"""``python -m tensorferry``: the same as the command ``tensorferry``."""

import sys

from .cli import main

sys.exit(main())
