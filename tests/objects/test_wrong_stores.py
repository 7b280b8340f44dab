"""What is no store, or not the one that was meant, is told at once and by its address."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import subprocess
import threading
from datetime import timedelta

import pytest
import torch
from dcp_doors import load, save

from stores import BUCKET, environment
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint, load_file
from tensorferry.errors import ConnectError, IncompleteCheckpoint, InvalidArgument, TensorferryError
from tensorferry.storage.objects import client

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
HTML = b"<!DOCTYPE html><html><body>Sign in</body></html>"
PLACE = f"s3://{BUCKET}/run"
TIMEOUT = timedelta(seconds=60)


@contextlib.contextmanager
def answering(status, body=b"", headers=(), certificate=None, head=None):
    """Yields the address of a server that answers everything alike, but for ``head`` of HEAD."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self):
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response_only(head or status if self.command == "HEAD" else status)
            for name, value in dict(headers).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        server.handle_error = lambda *_: None
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"{'http' if certificate is None else 'https'}://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.fixture
def at(monkeypatch):
    """Has clients look for the store at an address, and not for long."""
    monkeypatch.setattr(client, "_RETRIES", 1)

    def look(url):
        for name, value in environment(url).items():
            monkeypatch.setenv(name, value)

    return look


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority's certificate, and a server's with its key, which that one has signed."""
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "own.ext").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 30 -subj /CN=authority",
        "req -newkey rsa:2048 -nodes -keyout own.key -out own.csr -subj /CN=store",
        "x509 -req -in own.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -extfile own.ext -out own.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True, timeout=60)
    return folder / "ca.pem", (folder / "own.pem", folder / "own.key")


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
    with answering(200, HTML, {"content-type": "text/html"}) as url:
        at(url)
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
def test_a_private_authority_is_told_at_once_and_taken_where_it_is_named(at, certificates, monkeypatch, known_by):
    authority, own = certificates
    options = None
    if known_by == "root_certificate":
        options = {"client_options": {known_by: authority.read_bytes()}}
    elif known_by is not None:
        monkeypatch.setenv(known_by, str(authority))
    with answering(404, certificate=own) as url:
        at(url)
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
