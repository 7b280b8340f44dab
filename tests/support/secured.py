"""The state, the secret and the sending that the tests of a shared secret and of TLS have in common."""

from __future__ import annotations

import hashlib
import ssl
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

TIMEOUT = timedelta(seconds=30)
SECRET = "a secret of this job alone"


def state(seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"w": torch.randn(700_000), "half": torch.randn(5).half(), "object": [torch.Size([1]), {"lr": 0.1}]}


def send(source: Any, value: Any = None, step: int = 3) -> str:
    """Publishes `value`, or `state()`, at `source`, and returns its metadata."""
    source.send_checkpoint([1], step, state() if value is None else value, TIMEOUT)
    return source.metadata()


def fingerprint(certificate: Path) -> str:
    """Returns what URLs of a server with this certificate have before the @."""
    return f"sha256-{hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.read_text())).hexdigest()}"


def make_certificate(folder: Path, name: str = "own", kind: str = "ec") -> tuple[Path, Path]:
    """Makes a certificate and its key in ``folder`` as the guide says, or with another kind of key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    how = {"ec": ["ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"], "rsa": ["rsa:2048"], "ed25519": ["ed25519"]}[kind]
    named = ["-subj", "/CN=tensorferry", "-days", "3650", "-keyout", key, "-out", certificate]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", *how, "-nodes", *named],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return certificate, key
