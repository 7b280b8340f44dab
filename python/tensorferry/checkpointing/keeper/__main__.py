"""``python -m tensorferry.checkpointing.keeper``: the same as the command ``tensorferry keeper``."""

import sys

from .command import main

sys.exit(main())
