"""What is no store, or not the one that was meant, is told at once and by its address."""

from __future__ import annotations

import socket
import ssl
import subprocess
from datetime import timedelta

import pytest
import torch
from dcp_doors import load, save

from stores import BUCKET, Gateway, environment
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint, load_file
from tensorferry.errors import ConnectError, IncompleteCheckpoint, InvalidArgument, TensorferryError
from tensorferry.storage.objects import client

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
HTML = b"<!DOCTYPE html><html><body>Sign in</body></html>"
PLACE = f"s3://{BUCKET}/run"
TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def at(monkeypatch):
    """Has clients look for the store at an address, and not for long."""
    monkeypatch.setattr(client, "_RETRIES", 1)

    def look(url):
        for name, value in environment(url).items():
            monkeypatch.setenv(name, value)

    return look


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate that nobody but itself vouches for, and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    how = "req -x509 -newkey rsa:2048 -nodes -keyout own.key -out own.pem -days 30 -subj /CN=store -addext "
    how += "subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE"
    subprocess.run(["openssl", *how.split()], cwd=folder, check=True, capture_output=True, timeout=60)
    return folder / "own.pem", folder / "own.key"


DOORS = {
    "latest": lambda: latest_checkpoint(PLACE, timeout=TIMEOUT),
    "load_file": lambda: load_file(f"{PLACE}/x.pt", timeout=TIMEOUT),
    "save": lambda: save({"w": torch.ones(2)}, PLACE, timeout=TIMEOUT),
    "load": lambda: load({"w": torch.ones(2)}, PLACE, timeout=TIMEOUT),
    "checkpointer saves": lambda: SyncCheckpointer(patience=60).save(PLACE, {"w": torch.ones(2)}),
    "checkpointer loads": lambda: SyncCheckpointer(patience=60).load(PLACE),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_server_that_has_every_object_gives_no_checkpoint_and_keeps_none(at, door):
    with Gateway("", lambda *_: (200, HTML, {"content-type": "text/html"})) as server:
        at(server.url)
        with pytest.raises(TensorferryError):
            DOORS[door]()


@pytest.mark.parametrize("door", ["latest", "save"])
def test_an_address_at_which_nothing_listens_is_named_with_the_cause(at, door):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    at(url)
    with pytest.raises(ConnectError, match=f"cannot be reached at {url}: .*Connection refused.*AWS_ENDPOINT_URL"):
        DOORS[door]()


def test_an_endpoint_that_is_no_url_is_refused(at):
    at("me:secret-1@127.0.0.1:9000")
    with pytest.raises(InvalidArgument, match="must be a URL such as https://host:9000"):
        DOORS["load"]()


@pytest.mark.process
@pytest.mark.parametrize("known_by", [None, "AWS_CA_BUNDLE", "SSL_CERT_FILE", "root_certificate"])
def test_a_private_authority_is_told_at_once_and_taken_where_it_is_named(at, certificate, monkeypatch, known_by):
    authority = certificate[0]
    options = None
    if known_by == "root_certificate":
        options = {"client_options": {known_by: authority.read_bytes()}}
    elif known_by is not None:
        monkeypatch.setenv(known_by, str(authority))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server = Gateway("", lambda *_: (404, b""))
    server._server.socket = context.wrap_socket(server._server.socket, server_side=True)
    with server:
        at(url := server.url.replace("http:", "https:"))
        with pytest.raises(IncompleteCheckpoint if known_by else ConnectError) as raised:
            load_file(f"{PLACE}/x.pt", store_options=options, timeout=TIMEOUT)
    told = str(raised.value)
    if known_by is None:
        assert f"at {url}: its certificate is not accepted (UnknownIssuer)" in told
        assert "AWS_CA_BUNDLE" in told
    else:
        assert "there is no such" in told


def test_a_bundle_that_cannot_be_read_is_named(at, monkeypatch):
    at("https://127.0.0.1:9")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/there/is/none.pem")
    with pytest.raises(InvalidArgument, match=r"AWS_CA_BUNDLE=/there/is/none\.pem"):
        DOORS["load"]()
