"""Encryption from the environment, and certificates that are on disk before a server starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from equality import assert_same_state
from secured import TIMEOUT, fingerprint, make_certificate, send, state
from tensorferry import HTTPTransport, Network, cli
from tensorferry.cli import exits
from tensorferry.dcp import PeerReader, PeerWriter
from tensorferry.errors import InvalidArgument, UnprovenSource

pytestmark = pytest.mark.beyond_torchft


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return make_certificate(tmp_path)


@pytest.fixture
def by_environment(monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]) -> str:
    """Names the certificate in the environment; its fingerprint."""
    monkeypatch.setenv("TENSORFERRY_TLS_CERTIFICATE", str(files[0]))
    monkeypatch.setenv("TENSORFERRY_TLS_KEY", str(files[1]))
    return fingerprint(files[0])


@pytest.mark.process
@pytest.mark.parametrize("kind", ["ec", "rsa", "ed25519"])
def test_a_certificate_of_every_kind_is_shown_and_its_fingerprint_stays(
    open_transport: Any, tmp_path: Path, kind: str
) -> None:
    given = make_certificate(tmp_path, kind=kind)
    for _ in range(2):
        source = open_transport(tls=given, same_host=False)
        assert send(source).startswith(f"https://{fingerprint(given[0])}@")
        received = open_transport(same_host=False, tls=True).recv_checkpoint(0, source.metadata(), 3, TIMEOUT)
        assert_same_state(received, state())


def test_one_variable_is_enough_for_a_certificate_of_each_process(
    open_transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = send(open_transport(same_host=False))
    monkeypatch.setenv("TENSORFERRY_TLS", "1")
    one, other = (open_transport().metadata() for _ in range(2))
    assert one.startswith("https://sha256-")
    assert one.split("@")[0] != other.split("@")[0]
    # As with tls=True, what does not encrypt is refused.
    with pytest.raises(UnprovenSource, match="does not encrypt"):
        open_transport().recv_checkpoint(0, plain, 3, TIMEOUT)
    assert cli.main(["inspect", plain]) == exits.STATUS[UnprovenSource]


@pytest.mark.process
def test_verbs_and_other_doors_take_it_from_the_environment(
    by_environment: str, open_transport: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = send(open_transport(same_host=False))
    assert metadata.startswith(f"https://{by_environment}@")
    for verb in (["inspect", metadata], ["top", metadata, "--once"]):
        assert cli.main(verb) == exits.OK, capsys.readouterr()
    writer = PeerWriter()
    assert writer._server.url("here").startswith(f"https://{by_environment}@here:")
    writer.shutdown()


@pytest.mark.process
@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("CERT", None, "TENSORFERRY_TLS_CERTIFICATE is set, and TENSORFERRY_TLS_KEY is not"),
        (None, "KEY", "TENSORFERRY_TLS_KEY is set, and TENSORFERRY_TLS_CERTIFICATE is not"),
        ("/no/file", "KEY", "the certificate names a file that can.*/no/file"),
        ("CERT", "/no/file", "the key names a file that cannot.*/no/file"),
        ("", "KEY", "the certificate names a file that cannot be"),
        ("KEY", "KEY", "the certificate holds none in PEM form"),
        ("CERT", "CERT", "the key holds no private key in PEM"),
        ("CERT", "OTHER", "the key is not that of the certi"),
    ],
)
def test_what_cannot_be_used_is_named(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, certificate: Any, key: Any, words: str
) -> None:
    meant = {"CERT": files[0], "KEY": files[1]}
    if key == "OTHER":
        meant["OTHER"] = make_certificate(files[0].parent, "other")[1]
    for name, value in (("CERTIFICATE", certificate), ("KEY", key)):
        if value is not None:
            monkeypatch.setenv(f"TENSORFERRY_TLS_{name}", str(meant.get(value, value)))
    with pytest.raises(InvalidArgument, match=words) as raised:
        HTTPTransport(TIMEOUT)
    assert "PRIVATE KEY" not in str(raised.value)


def test_an_argument_has_the_last_word_and_a_receiver_needs_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORFERRY_TLS_CERTIFICATE", "/no/file")
    monkeypatch.setenv("TENSORFERRY_TLS_KEY", "/no/file")
    PeerReader()
    assert Network().tls
    assert not Network(tls=False).tls
    monkeypatch.setenv("TENSORFERRY_TLS", "0")
    assert not Network().tls


PLACE = "127.0.0.1:1/abcdefghijklmnop/checkpoint/"
WRONG = {
    f"https://{PLACE}": "without the fingerprint of (its|the) certificate",
    f"https://sha256-12@{PLACE}": "is not the fingerprint of a certificate",
    "https://me@host:80/00/checkpoint/": "fingerprint",
    f"http://sha256-{'0' * 64}@{PLACE}": "does not encrypt, and",
}


@pytest.mark.parametrize("url", WRONG)
def test_a_receive_says_it_too(url: str, open_transport: Any) -> None:
    with pytest.raises(InvalidArgument, match=WRONG[url]) as raised:
        open_transport().recv_checkpoint(0, url, 3, TIMEOUT)
    assert "metadata() of the source" in str(raised.value)
