"""The page for people: read by an HTML parser and, where there is one, by a browser."""

from __future__ import annotations

import html.parser
import socket
import urllib.error
import urllib.request
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
import torch

TIMEOUT = timedelta(seconds=30)
VOID = {"meta", "link", "br", "img", "input"}
#: Sent as bytes, as no client of ours would: quotes and ampersands, and letters that change the order of a line.
HOSTILE = b"x&\"'{onload=alert(1)}/\xe2\x80\xae\xc3\xbc"

pytestmark = pytest.mark.beyond_torchft


class Page(html.parser.HTMLParser):
    """Notes elements, attributes and text, and that everything that is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.attributes, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def ask(transport, path):
    """Sends a request with exactly these bytes as its path, below the random part."""
    where = urlsplit(transport.metadata())
    with socket.create_connection((where.hostname, where.port), timeout=10) as peer:
        peer.sendall(b"GET " + where.path.encode() + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while more := peer.recv(1 << 16):
            answer += more
    return answer


@pytest.fixture
def busy(open_transport):
    """A transport with something in every part of its page."""
    source, other = open_transport(interface="127.0.0.1"), open_transport(interface="127.0.0.1", same_host=False)
    other.send_checkpoint([1], 6, {"w": torch.zeros(1 << 18)}, TIMEOUT)
    source.recv_checkpoint(0, other.metadata(), 6, TIMEOUT)
    with pytest.raises(Exception, match="invalid checkpoint requested"):
        source.recv_checkpoint(0, other.metadata(), 5, TIMEOUT)
    source.send_checkpoint([1], 7, {"w": torch.zeros(1 << 18)}, TIMEOUT)
    other.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)
    for path in (HOSTILE, b"x&<b>/0", b"5.safetensors"):
        ask(source, path)
    return source


def read(url):
    with urllib.request.urlopen(url) as answer:
        return answer.headers, answer.read().decode()


def test_the_page_is_whole_and_loads_nothing(busy):
    headers, text = read(busy.status_url())
    assert read(busy.metadata())[1].split("</style>")[0].count("<title>") == 1, (
        "the URL in the metadata leads there, too"
    )
    page = Page(text)
    assert headers["content-type"] == "text/html; charset=utf-8"
    policy = headers["content-security-policy"]
    nonce = dict(page.attributes)["nonce"]
    assert f"default-src 'none'; style-src 'nonce-{nonce}';" in policy
    assert read(busy.status_url())[0]["content-security-policy"] != policy, "a nonce is used once"
    assert not {"script", "link", "img", "iframe", "a", "form", "object"} & set(page.elements)
    named = {name for name, _ in page.attributes}
    assert not {"src", "href", "style"} & named
    assert not [name for name in named if name.startswith("on")]
    shown = " ".join(page.text)
    for what in (
        "step 7",
        "the gate is open",
        "failed: WrongStep, of 127.0.0.1:",
        "1 healed, 1 failed",
        "serving 7 but got step=5",
    ):
        assert what in shown, what


def test_what_peers_say_is_text_and_bounded(busy):
    for number in range(40):
        ask(busy, b"y" * 5000 + b"/%d/" % number)
    ask(busy, HOSTILE)
    _, text = read(busy.status_url())
    assert "x&amp;&quot;&#39;{onload=alert(1)}" in text
    assert text.isascii()
    assert text.count("invalid url format") == 16
    assert len(text) < 16_000
    busy.disallow_checkpoint()
    assert "the gate is closed: nothing is published now" in read(busy.status_url())[1]


def test_a_stranger_can_neither_read_nor_write_the_page(busy):
    where = urlsplit(busy.metadata())
    for path in ("/", "/checkpoint/", "/stranger/", f"/{'0' * 32}/stranger"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{where.netloc}{path}")
    assert "stranger" not in read(busy.status_url())[1]
