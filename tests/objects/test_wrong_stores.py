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
import torch.distributed.checkpoint as dcp

from stores import BUCKET, environment
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint, load_file
from tensorferry.cli import places
from tensorferry.dcp import FileReader, FileWriter, own_errors
from tensorferry.errors import ConnectError, FetchTimeout, IncompleteCheckpoint, InvalidArgument, StoreRefused
from tensorferry.storage.objects import client
from tensorferry.storage.objects.answers import _why_unreachable
from tensorferry.storage.objects.place import ObjectPlace
from tensorferry.storage.places import any_place
from tensorferry.storage.stores import store_of

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
    """Has clients look for the store at an address, of which they know nothing: ports come again."""
    monkeypatch.setattr(client, "_to_meet", {})

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


def save(place=PLACE):
    with own_errors():
        dcp.save({"w": torch.ones(2)}, storage_writer=FileWriter(place, timeout=TIMEOUT), no_dist=True)


def load(place=PLACE):
    with own_errors():
        dcp.load({"w": torch.ones(2)}, storage_reader=FileReader(place, timeout=TIMEOUT), no_dist=True)


DOORS = {
    "latest": lambda: latest_checkpoint(PLACE, timeout=TIMEOUT),
    "load_file": lambda: load_file(f"{PLACE}/x.pt", timeout=TIMEOUT),
    "save": save,
    "load": load,
    "checkpointer saves": lambda: SyncCheckpointer(patience=60).save(PLACE, {"w": torch.ones(2)}),
    "checkpointer loads": lambda: SyncCheckpointer(patience=60).load(PLACE),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("headers", "head"),
    [({}, 200), ({"ETag": '"x"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}, 200), ({}, 405)],
    ids=["bare", "with tags", "not asked"],
)
def test_a_server_that_has_every_object_is_no_store(at, door, headers, head):
    with answering(200, HTML, {"content-type": "text/html", **headers}, head=head) as url:
        at(url)
        with pytest.raises(StoreRefused, match=f"answers at {url} is no object store"):
            DOORS[door]()


@pytest.fixture
def hasty(monkeypatch):
    """Shortens the time in which something has to answer, which is 10 seconds."""
    monkeypatch.setattr(client, "_MEET_S", 1.0)
    monkeypatch.setattr(client, "_ATTEMPT_S", 0.4)
    monkeypatch.setattr(client, "_PAUSE_S", 0.1)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("door", ["latest", "load", "save"])
def test_an_address_at_which_nothing_listens_is_named_with_the_cause(at, door):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    at(url)
    with pytest.raises(ConnectError, match=f"cannot be reached at {url}: Connection refused") as raised:
        DOORS[door]()
    assert "TLS" not in str(raised.value)


@pytest.mark.usefixtures("hasty")
def test_a_server_that_never_answers_is_named(at):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        at(url)
        with pytest.raises((ConnectError, FetchTimeout), match=f"at {url}: it does not answer") as raised:
            load()
        assert "TLS" not in str(raised.value)


@pytest.mark.process
@pytest.mark.usefixtures("hasty")
def test_a_server_that_speaks_tls_is_told_by_its_answer(at, certificates):
    with answering(404, certificate=certificates[1]) as url:
        at(url.replace("https", "http"))
        with pytest.raises(ConnectError, match=r"at http://.*begins with https://"):
            load()


@pytest.mark.usefixtures("hasty")
def test_without_an_endpoint_that_of_aws_is_named(at, monkeypatch):
    at("")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(ConnectError, match=r"at https://s3\.us-east-1\.amazonaws\.com: .*set AWS_ENDPOINT_URL"):
        load()


def test_without_credentials_the_server_of_the_machine_is_not_blamed():
    text = (
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 3s, after 0 retries - HTTP "
        'error: error sending request\n\nDebug source:\nConnectError("tcp connect error", Os { message: "timed out" })'
    )
    assert "Set AWS_ACCESS_KEY_ID" in _why_unreachable(text, "https://s3.x.amazonaws.com", None)


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
        assert all(name in told for name in ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "root_certificate"))
    else:
        assert "there is no such" in told


def test_a_bundle_that_cannot_be_read_is_named(at, monkeypatch):
    at("https://127.0.0.1:9")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/there/is/none.pem")
    with pytest.raises(InvalidArgument, match=r"AWS_CA_BUNDLE=/there/is/none\.pem"):
        load()


def test_a_server_without_tls_is_told_at_once(at):
    with answering(404) as url:
        at(url.replace("http", "https"))
        with pytest.raises(ConnectError, match=r"does not speak TLS.*begins with http://"):
            load()


@pytest.mark.parametrize("body", [b"", b"<Error><Code>PermanentRedirect</Code><Message>Elsewhere.</Message></Error>"])
@pytest.mark.parametrize("status", [301, 400])
@pytest.mark.parametrize("door", ["load", "load_file", "save", "latest"])
def test_another_region_is_named(at, status, body, door):
    with answering(status, body, {"x-amz-bucket-region": "eu-west-3"}) as url:
        at(url)
        with pytest.raises(StoreRefused, match="the bucket is in the region eu-west-3: set AWS_REGION"):
            DOORS[door]()


def test_a_region_is_found_in_the_body_as_well(at):
    body = b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>No.</Message><Region>eu-west-3</Region></Error>"
    with answering(400, body) as url:
        at(url)
        with pytest.raises(StoreRefused, match="the bucket is in the region eu-west-3"):
            DOORS["latest"]()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("AWS_ENDPOINT_URL", "not a url", r"AWS_ENDPOINT_URL\) must be a URL"),
        ("AWS_ENDPOINT_URL", "127.0.0.1:9000", r"must be a URL such as https://host:9000"),
        ("AWS_ENDPOINT_URL", "", r"AWS_ENDPOINT_URL is empty"),
        ("AWS_ENDPOINT_URL", "http://", r"must be a URL"),
        ("AWS_ENDPOINT_URL", "http://[::1", r"must be a URL"),
        ("AWS_ENDPOINT_URL", "ftp://me:secret-1@host", r"must be a URL.*ftp://host"),
        ("AWS_SESSION_TOKEN", "secret-1\n", r"token \(in store_options, or AWS_SESSION_TOKEN\) has a line break"),
        ("AWS_ACCESS_KEY_ID", "secret-1\r", r"AWS_ACCESS_KEY_ID\) has a line break"),
        ("AWS_SECRET_ACCESS_KEY", "secret-1\n", r"AWS_SECRET_ACCESS_KEY\) has a line break"),
        ("AWS_REGION", "us-east-1\n", r"AWS_REGION\) has a line break"),
    ],
)
@pytest.mark.parametrize("by", ["environment", "options"])
def test_what_no_request_can_have_is_refused_by_its_name(at, monkeypatch, capfd, name, value, told, by):
    at("http://127.0.0.1:9")
    options = None
    if by == "options":
        options = {name.lower(): value}
        told = "is empty" if not value else told
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match=told) as raised:
        load_file(f"{PLACE}/x.pt", store_options=options)
    assert "secret-1" not in str(raised.value)
    assert "panicked" not in capfd.readouterr().err


def test_the_words_of_a_store_are_told_whole(at):
    """The key stands in some messages of the library, and its words say nothing."""
    answer = b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>"
    with answering(404, answer) as url:
        at(url)
        for key in ("d", "bucket", "does"):
            place = any_place(f"s3://{BUCKET}/{key}")
            for request in (store_of(place).entries, lambda place=place: place.write_bytes(b"x")):
                with pytest.raises(StoreRefused, match=r"NoSuchBucket \(The specified bucket does not exist\)"):
                    request()


def test_a_store_that_is_ill_is_asked_for_one_name(at, monkeypatch):
    """For each further one, all requests would be made again and again."""
    with answering(500) as url:
        at(url)
        asked, real, head = [], client._make, ObjectPlace.stat
        monkeypatch.setattr(client, "_make", lambda *how: real(*how[:3], 0))
        monkeypatch.setattr(ObjectPlace, "stat", lambda place: asked.append(place.name) or head(place))
        for find in (places.find, lambda text: places.settled(lambda: places.find(text), text)):
            with pytest.raises(StoreRefused, match=f"the store at {url} refuses: .*500"):
                find(PLACE)
        assert asked == ["index.safetensors"] * 2
