"""What the README shows runs: here, and from the wheel in an environment of its own."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python(?P<mark>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def examples(document: str = "README.md") -> list[str]:
    found = BLOCK.finditer((ROOT / document).read_text())
    return [m["code"] for m in found if "notest" not in m["mark"]]


def run(python: Path | str, code: str, folder: Path) -> None:
    script = folder / "example.py"
    script.write_text(code)
    done = subprocess.run([python, script], cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr


def test_readme_has_the_swap_and_a_whole_example():
    code = examples()
    assert code[0].startswith("from tensorferry import HTTPTransport")
    assert any("recv_checkpoint" in c for c in code)


@pytest.mark.parametrize("code", examples())
def test_readme_example_runs(code: str, tmp_path: Path):
    run(sys.executable, code, tmp_path)


def test_the_example_of_distributed_checkpoints_runs(tmp_path: Path):
    (code,) = examples("docs/dcp.md")
    run(sys.executable, code, tmp_path)


def test_the_swap_line_is_the_import_of_torchft(tmp_path: Path):
    code = examples()[0]
    swapped = re.search(r"# was: (?P<line>.+)$", code, re.MULTILINE)
    assert swapped is not None
    run(sys.executable, swapped["line"], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_runs_the_example_in_an_empty_environment(tmp_path: Path):
    (wheel,) = (ROOT / "dist").glob("*.whl")
    uv = Path(sys.executable).parent / "uv"
    env = tmp_path / "env"
    python = env / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", env], check=True, timeout=60)
    # torch comes out of uv's cache by link; the wheel itself is installed by pip, with its dependencies checked.
    torch_version = torch.__version__.split("+")[0]
    subprocess.run(
        [uv, "pip", "install", "-q", "--python", python, f"torch=={torch_version}", "numpy"], check=True, timeout=400
    )
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-index", wheel], check=True, timeout=120)
    listed = subprocess.run([python, "-m", "pip", "list"], check=True, capture_output=True, text=True, timeout=60)
    assert "torchft" not in listed.stdout
    for code in examples():
        run(python, code, tmp_path)


def test_version_is_the_same_everywhere():
    import tensorferry

    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert tensorferry.__version__ == version
