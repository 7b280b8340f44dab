"""A shared secret: a peer without it receives nothing, and nothing is accepted from it."""

import logging
import pickle
import traceback
import urllib.error
import urllib.request

import pytest
import torch

import tensorferry
from equality import assert_same_state
from secured import SECRET, TIMEOUT, send, state
from tensorferry.errors import InvalidArgument, ProtocolError, SourceRefused, UnprovenSource

OTHER = "a secret of another job"

pytestmark = pytest.mark.beyond_torchft


@pytest.fixture(autouse=True)
def no_secret_around(monkeypatch):
    monkeypatch.delenv("TENSORFERRY_SECRET", raising=False)
    monkeypatch.delenv("TENSORFERRY_SECRET_FILE", raising=False)


class Unpickled(Exception):
    pass


class Trap:
    """Raises when it is unpickled."""

    def __reduce__(self):
        return _trapped, ()


def _trapped():
    raise Unpickled


@pytest.mark.parametrize("same_host", [True, False])
def test_a_peer_with_the_secret_receives(open_transport, same_host):
    source = open_transport(secret=SECRET, same_host=same_host)
    receiver = open_transport(secret=SECRET.encode(), num_chunks=3)
    assert_same_state(receiver.recv_checkpoint(0, send(source), 3, TIMEOUT), state())


def test_the_environment_and_a_file_name_it(open_transport, monkeypatch, tmp_path):
    source = open_transport(secret=SECRET)
    metadata = send(source)
    monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
    assert_same_state(open_transport().recv_checkpoint(0, metadata, 3, TIMEOUT), state())
    with pytest.raises(SourceRefused, match="another shared secret"):
        open_transport(secret=OTHER).recv_checkpoint(0, metadata, 3, TIMEOUT)
    monkeypatch.delenv("TENSORFERRY_SECRET")
    for text in (SECRET, SECRET + "\n", SECRET + "\r\n"):
        file = tmp_path / "secret"
        file.write_bytes(text.encode())
        monkeypatch.setenv("TENSORFERRY_SECRET_FILE", str(file))
        assert_same_state(open_transport().recv_checkpoint(0, metadata, 3, TIMEOUT), state())


def test_what_cannot_be_a_secret_is_refused(open_transport, monkeypatch, tmp_path):
    for bad in ("", b"", "short", b"fifteen bytes !"):
        with pytest.raises(InvalidArgument, match="openssl rand"):
            open_transport(secret=bad)
    # A variable that is set but empty is a lost secret, not a request for no secret.
    monkeypatch.setenv("TENSORFERRY_SECRET", "")
    with pytest.raises(InvalidArgument, match="0 bytes"):
        open_transport()
    monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
    monkeypatch.setenv("TENSORFERRY_SECRET_FILE", str(tmp_path / "nothing"))
    with pytest.raises(InvalidArgument, match="both set"):
        open_transport()
    monkeypatch.delenv("TENSORFERRY_SECRET")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        open_transport()


def test_a_peer_without_the_secret_learns_why(open_transport):
    metadata = send(open_transport(secret=SECRET))
    remedy = "asks for a shared secret, and this receiver has none. Give .* secret=, or TENSORFERRY_SECRET"
    with pytest.raises(SourceRefused, match=remedy) as refused:
        open_transport().recv_checkpoint(0, metadata, 3, TIMEOUT)
    assert refused.value.code == 404
    with pytest.raises(SourceRefused, match="another shared secret than this receiver"):
        open_transport(secret=OTHER).recv_checkpoint(0, metadata, 3, TIMEOUT)


def test_nothing_is_unpickled_from_a_source_that_cannot_prove_itself(open_transport):
    metadata = send(open_transport(), {"w": torch.ones(3), "trap": Trap()})
    with pytest.raises(ProtocolError, match="Unpickled"):
        open_transport(trust_pickle=True).recv_checkpoint(0, metadata, 3, TIMEOUT)
    remedy = "does not prove that it knows the shared secret: .* Give the source .* secret=, or TENSORFERRY_SECRET"
    with pytest.raises(UnprovenSource, match=remedy) as refused:
        open_transport(secret=SECRET, trust_pickle=True).recv_checkpoint(0, metadata, 3, TIMEOUT)
    assert isinstance(refused.value, urllib.error.URLError)
    assert isinstance(refused.value, PermissionError)


def test_stock_peers_stay_outside(open_transport, open_stock):
    metadata = send(open_transport(secret=SECRET))
    with pytest.raises(urllib.error.HTTPError) as refused:
        open_stock().recv_checkpoint(0, metadata, 3, TIMEOUT)
    assert (refused.value.code, refused.value.reason) == (404, "not found")
    refused.value.close()
    stock = send(open_stock(), {"trap": Trap()})
    with pytest.raises(UnprovenSource, match="stock torchft source, which cannot prove"):
        open_transport(secret=SECRET, trust_pickle=True).recv_checkpoint(0, stock, 3, TIMEOUT)


def test_it_shows_itself_nowhere(open_transport, caplog):
    shown = []
    with caplog.at_level(logging.DEBUG):
        source, receiver = open_transport(secret=SECRET), open_transport(secret=SECRET)
        metadata = send(source)
        receiver.recv_checkpoint(0, metadata, 3, TIMEOUT)
        for wrong in (
            lambda: open_transport(secret=OTHER).recv_checkpoint(0, metadata, 3, TIMEOUT),
            lambda: receiver.recv_checkpoint(0, send(open_transport()), 3, TIMEOUT),
            lambda: open_transport(secret=SECRET[:15]),
        ):
            with pytest.raises(tensorferry.TensorferryError) as failed:
                wrong()
            shown += [repr(failed.value), *traceback.format_exception(failed.value)]
    shown += [r.getMessage() for r in caplog.records]
    for transport in (source, receiver):
        native = transport._network.secret
        shown += [repr(transport), str(vars(transport)), repr(native), metadata]
        assert not [name for name in dir(native) if not name.startswith("__")]
        with pytest.raises(TypeError):
            pickle.dumps(native)
    # The traceback shows lines of this file, which have the names of constants and not their values.
    for text in shown:
        assert SECRET[:15] not in text
        assert SECRET.encode().hex()[:16] not in text
