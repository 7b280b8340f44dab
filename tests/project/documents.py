"""The pages of the documentation, their blocks of code, and what a block presupposes.

``needs=NAME`` behind the language of a block of Python says that it needs a package which an environment of only the
wheel and torch does not have. ``file=NAME`` is a file of the reader's, which a test of its page runs as the page says.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import forked

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *PAGES]
BLOCK = re.compile(r"^```(?P<language>\w+)(?: (?P<mark>[^\n]*))?\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)

_STATE = """
import torch
import torch.distributed.checkpoint as dcp
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter
state = {"weight": torch.ones(1000)}
"""
_KEEPER = """
import atexit, contextlib, os, subprocess, sys
os.environ["TENSORFERRY_KEEPER_DIR"] = os.path.abspath("keeper")
import torch
import tensorferry.checkpointing
_process = subprocess.Popen([sys.executable, "-m", "tensorferry.checkpointing.keeper", "--interface", "127.0.0.1"])
atexit.register(_process.terminate)
_is_up = False
while not _is_up:
    with contextlib.suppress(ConnectionError):
        _is_up = bool(tensorferry.checkpointing.Keeper().status())
"""
#: What Megatron needs besides what it says, by which its blocks are marked.
MEGATRON = "psutil"
#: One rank, without a GPU, with the release that the Makefile puts beside the environment.
_RELEASE = f"""
import sys
sys.path.insert(0, {str(Path(sys.prefix) / "megatron-0.19.2")!r})
"""
_MEGATRON = f"""
{_RELEASE}
import tempfile, torch
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
from megatron.core.dist_checkpointing import ShardedTensor
folder = tempfile.mkdtemp(dir=".")
sharded_state_dict = {{"weight": ShardedTensor.from_rank_offsets("weight", torch.ones(8, 8)), "iteration": 3}}
"""
#: A manager needs a lighthouse and a store (`make demo` has them); this only checks that it accepts the arguments.
_MANAGER = """
import inspect
from datetime import timedelta
import torchft
from tensorferry import HTTPTransport
_signature = inspect.signature(torchft.Manager)
torchft.Manager = lambda *args, **options: _signature.bind_partial(*args, **options)
"""
#: A bucket on a server of this process.
_BUCKET = f"""{_STATE}
import logging, os, sys, warnings
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
warnings.simplefilter("ignore")
import atexit, stores
_server = stores.moto()
os.environ.update(stores.environment(_server.__enter__()))
atexit.register(_server.__exit__, None, None, None)
"""
#: The code that precedes blocks with these beginnings.
SURROUNDINGS = {
    'dcp.save(state, storage_writer=FileWriter("s3://': _BUCKET,
    # A keeper of its own, and the folder of checkpoints below the one in which the test runs.
    "from tensorferry.checkpointing import AsyncCheckpointer\n\ncheckpointer = AsyncCheckpointer(keeper=": f"""{_KEEPER}
import tensorferry.checkpointing
class _Here:
    def __init__(self, made): self.made = made
    def save(self, path, *state, **options): return self.made.save("." + path, *state, **options)
    def load(self, path, *state): return self.made.load("." + path, *state)
    def close(self): self.made.close()
_make = tensorferry.checkpointing.AsyncCheckpointer
tensorferry.checkpointing.AsyncCheckpointer = lambda **options: _Here(_make(**options))
state = {{"weight": torch.ones(1000)}}
""",
    "from tensorferry.checkpointing import Keeper": _KEEPER,
    "from tensorferry.checkpointing import Keeper, peer_metadata": f"""{_STATE}
import time
_saving = tensorferry.checkpointing.SyncCheckpointer(keeper="default")
_saving.save(os.path.abspath("step-1"), state)
while not tensorferry.checkpointing.Keeper().held(): time.sleep(0.01)
""",
    "from datetime import timedelta\n\nimport torchft\n": _MANAGER
    + """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
""",
    "import tempfile\n\nimport torch\nfrom megatron.core": _RELEASE,
    "from megatron.core import dist_checkpointing": _MEGATRON,
    "from tensorferry import megatron\nfrom tensorferry.dcp import PeerWriter": _MEGATRON,
    # A rank that heals from another one, which is in the same process.
    "from megatron.core.dist_checkpointing.dict_utils": f"""{_MEGATRON}
from datetime import timedelta
import tensorferry
peer, step, timeout, is_healthy = 0, 7, timedelta(seconds=30), False
_healthy = tensorferry.HTTPTransport(timeout)
_healthy.send_checkpoint([1], step, {{"weight": torch.ones(8, 8), "iteration": 3}}, timeout)
peers_metadata = _healthy.metadata()
sharded_state_dict["weight"].data.zero_()
""",
    "from tensorferry.megatron import ZarrLoadShardedStrategy": f"""{_MEGATRON}
from megatron.core import dist_checkpointing
from tensorferry.megatron import ZarrSaveShardedStrategy
torch.cuda.synchronize = lambda *_: None
dist_checkpointing.save(sharded_state_dict, folder, ZarrSaveShardedStrategy())
""",
    "manager = torchft.Manager(": _MANAGER,
    # The README's.
    "from tensorferry import HTTPTransport  # was:": _MANAGER,
    "import torch.distributed.checkpoint as dcp\nfrom tensorferry.dcp import FileReader, FileWriter\n\ndcp.": _STATE,
    "from tensorferry.checkpointing import AsyncCheckpointer\n\ncheckpointer = AsyncCheckpointer(keep_last=": """
import torch
state, step = {"weight": torch.ones(1000)}, 1
""",
    "from tensorferry import megatron\n\nmegatron.save(": _MEGATRON,
    "weights = model.state_dict()": _MANAGER
    + """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
load_state_dict = model.load_state_dict
""",
}


@dataclass
class Block:
    document: str
    language: str
    kind: str
    name: str
    code: str

    def __str__(self) -> str:
        return f"{self.document}: {self.code.splitlines()[0][:50]}"

    def whole(self) -> str:
        before = [text for begins, text in SURROUNDINGS.items() if self.code.startswith(begins)]
        return "".join(before) + self.code


def blocks(language: str) -> list[Block]:
    found = []
    for document in DOCUMENTS:
        for match in BLOCK.finditer((ROOT / document).read_text()):
            mark = match["mark"] or ""
            kind, _, name = mark.partition("=")
            assert kind in ("", "needs", "file"), f"{document}: the mark {mark!r} of a block is unknown"
            if match["language"] == language:
                found.append(Block(document, language, kind, name, match["code"]))
    return found


def run(python: Path | str, code: str, folder: Path) -> str:
    script = folder / "example.py"
    script.write_text(code)
    # No modules of this checkout or of the user.
    done = forked.run([python, "-I", script], cwd=folder, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout
