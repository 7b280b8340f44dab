"""Makes the scenario runner of examples/heal importable."""

import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "heal"
sys.path.insert(0, str(EXAMPLE))
