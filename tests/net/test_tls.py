"""TLS with a pinned certificate: a receiver needs nothing but the metadata."""

import hashlib
import logging
import socket
import ssl
from urllib.parse import urlsplit

import pytest
import torch

from equality import assert_same_state
from exchange import figure
from secured import SECRET, TIMEOUT, send, state
from tensorferry import join_metadata
from tensorferry.errors import UnprovenSource

pytestmark = pytest.mark.beyond_torchft


@pytest.mark.parametrize(("secret", "same_host"), [(None, False), (SECRET, True)])
def test_a_receiver_needs_the_metadata_alone(open_transport, caplog, secret, same_host):
    source = open_transport(tls=True, secret=secret, same_host=same_host)
    whole = state() | {"large": torch.ones(20 << 18)}  # enough for shared memory
    metadata = send(source, whole)
    assert metadata.startswith("https://sha256-")
    assert metadata == source.address()
    with caplog.at_level(logging.INFO, "tensorferry"):
        received = open_transport(secret=secret, same_host=same_host).recv_checkpoint(0, metadata, 3, TIMEOUT)
    assert_same_state(received, whole)
    assert ("over shared memory" in caplog.text) == same_host
    assert (" <- " in caplog.text) != same_host


def test_metadata_of_every_host_can_be_read(open_transport):
    for advertise in ("127.0.0.1", "localhost", "::1"):
        metadata = send(open_transport(tls=True, advertise=advertise))
        url = urlsplit(metadata)
        assert url.hostname == advertise
        assert len(url.username) == len("sha256-") + 64
        assert_same_state(open_transport(same_host=False).recv_checkpoint(0, metadata, 3, TIMEOUT), state())


def test_a_receiver_with_tls_fetches_from_no_plain_source(open_transport, open_stock):
    plain, receiver = open_transport(), open_transport(tls=True, same_host=True)
    stock = open_stock()
    stock.send_checkpoint([1], 3, state(), TIMEOUT)
    for metadata in (send(plain), stock.metadata()):
        with pytest.raises(UnprovenSource, match="does not encrypt") as refused:
            receiver.recv_checkpoint(0, metadata, 3, TIMEOUT)
        assert urlsplit(metadata).netloc in str(refused.value)
        assert plain.metadata() not in str(refused.value), "metadata opens the door"
    assert figure(plain, "sent_bytes_total") == 0
    assert_same_state(receiver.recv_checkpoint(0, send(open_transport(tls=True)), 3, TIMEOUT), state())


def test_of_several_sources_only_those_that_encrypt_are_used(open_transport, caplog):
    plain, secured = open_transport(), open_transport(tls=True)
    joined = join_metadata([send(plain), send(secured)])
    received = open_transport(tls=True).recv_checkpoint(0, joined, 3, TIMEOUT)
    assert_same_state(received, state())
    assert f"{urlsplit(plain.metadata()).netloc} does not encrypt and is left out" in caplog.text
    assert figure(plain, "sent_bytes_total") == 0


def test_another_implementation_agrees_on_version_and_certificate(open_transport):
    """OpenSSL, through Python, negotiates only TLS 1.3 and sees a certificate with this fingerprint."""
    url = urlsplit(send(open_transport(tls=True)))
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection((url.hostname, url.port), 10) as plain,
        context.wrap_socket(plain) as secured,
    ):
        assert secured.version() == "TLSv1.3"
        assert "sha256-" + hashlib.sha256(secured.getpeercert(binary_form=True)).hexdigest() == url.username
        secured.sendall(f"GET {url.path}3/header HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert secured.recv(1 << 16).startswith(b"HTTP/1.1 200")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection((url.hostname, url.port), 10) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)
