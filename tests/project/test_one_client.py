"""One client opens all connections: no URL with a fingerprint leads anywhere without a look at the certificate."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "tensorferry"
#: Clients of other makers, and what builds one.
CLIENTS = {
    "http.client",
    "urllib.request",
    "ssl",
    "socketserver",
    "http.server",
    "xmlrpc",
    "ftplib",
    "telnetlib",
    "smtplib",
}
CLIENTS |= {"requests", "httpx", "aiohttp", "urllib3", "websockets", "grpc", "asyncio"}
#: Names by which a socket reaches another host, or TLS is done without looking.
NAMES = {"create_connection", "open_connection", "AF_INET", "AF_INET6", "wrap_socket", "CERT_NONE", "urlopen"}
#: The fault suite attacks servers, and `addresses` connects datagram sockets, which sends nothing.
MAY = {"net/addresses.py": {"AF_INET", "AF_INET6"}}
#: Object stores are reached by obstore, whose coroutines need a loop; the header of an error that names a bucket's
#: region is asked for without it.
MAY |= {f"storage/objects/{name}.py": {"asyncio"} for name in ("client", "loop", "place", "reader", "requests")}
MAY["storage/objects/client.py"] |= {"http.client", "urllib.request", "urlopen"}
TESTING = "testing/"


def uses(source: str) -> set[str]:
    """Returns what a module has of the above."""
    modules, names = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Call):
            # As importlib.import_module is given them.
            modules |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    found = {client for client in CLIENTS for name in modules if name == client or name.startswith(f"{client}.")}
    return found | (names & NAMES)


MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith(TESTING)])
def test_no_module_has_a_client_of_its_own(module: str) -> None:
    assert uses((PACKAGE / module).read_text()) <= MAY.get(module, set())


@pytest.mark.parametrize(
    "source",
    [
        "import http.client",
        "from http import client",
        "def f():\n    from urllib.request import urlopen",
        "import ssl as s",
        "import socket\nsocket.create_connection(('h', 1))",
        "import importlib\nimportlib.import_module('http.client')",
        "import socket\nsocket.socket(socket.AF_INET)",
    ],
)
def test_a_client_would_be_found(source: str) -> None:
    assert uses(source)


def test_the_engine_connects_in_one_place_and_compares_certificates_in_one() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "rust").rglob("src/**/*.rs")}

    def code(text: str) -> str:
        # Without comments, and without the tests of a module, which stand behind its code.
        lines = text.split("#[cfg(test)]")[0].splitlines()
        return "\n".join(line for line in lines if not line.lstrip().startswith("//"))

    def having(*texts: str) -> set[str]:
        return {name for name, text in sources.items() if any(t in code(text) for t in texts)}

    # The other one is the socket between processes of one machine.
    assert having("socket.connect(", "TcpStream::connect", "TcpSocket") == {
        "rust/core/src/client/connection/connect.rs",
        "rust/core/src/same_host/mod.rs",
    }
    assert having(".dangerous()", "with_custom_certificate_verifier") == {"rust/core/src/trust/pinned.rs"}
    # What makes the configuration of a client takes the fingerprint, and is called where a URL is read.
    assert having("tls::client(") == {"rust/core/src/client/url.rs"}


def test_the_command_that_looks_at_a_fleet_loads_no_other_client() -> None:
    block = (
        "import sys, tensorferry.cli.fleet; print(sorted({'ssl', 'http.client', 'urllib.request'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
