"""Every kind of leaf a training state was seen to hold, and a catalogue of odd trees, each as a named constructor.

What each entry says about torchft 0.2.0 was measured on its HTTPTransport; `pytest --transport torchft` measures it
again.
"""

from __future__ import annotations

from object_leaves import OBJECTS, REFUSED, TRAINING, TREES
from tensor_leaves import ALIASES, PARAMETERS, SPECIAL, TENSORS

CARRIED = [*TENSORS, *PARAMETERS, *ALIASES, *SPECIAL, *OBJECTS, *TRAINING, *TREES]
CATALOGUE = {leaf.name: leaf for leaf in [*CARRIED, *REFUSED]}
assert len(CATALOGUE) == len(CARRIED) + len(REFUSED), "a name is used twice"
