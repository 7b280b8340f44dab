"""The page for people: what it loads, and what its script shows."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
import torch

TIMEOUT = timedelta(seconds=30)
#: Sent as bytes, as no client of ours would: quotes and ampersands, and letters that change the order of a line.
HOSTILE = b"x&\"'{onload=alert(1)}/\xe2\x80\xae\xc3\xbc"

pytestmark = pytest.mark.beyond_torchft


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


#: As much of a browser's document as the script uses: what it has shown is printed at the end.
DOCUMENT = """
class Node {
  constructor() { this.parts = []; }
  append(...parts) { this.parts.push(...parts); }
  replaceChildren(...parts) { this.parts = parts; }
  said() { return [this.textContent ?? "", ...this.parts.map(part => part.said ? part.said() : part)].join(" "); }
}
const known = {};
globalThis.document = {
  createElement: () => new Node(),
  getElementById: name => known[name] ??= new Node(),
};
globalThis.fetch = async () => ({ok: true, json: async () => JSON.parse(require("fs").readFileSync(0, "utf8"))});
const say = () => console.log(Object.values(known).map(one => one.said()).join(" "));
globalThis.setInterval = () => setTimeout(say, 100);
"""


def read(url):
    with urllib.request.urlopen(url) as answer:
        return answer.headers, answer.read().decode()


def figures(transport):
    headers, text = read(transport.status_url() + "?json")
    assert headers["content-type"] == "application/json"
    assert text.isascii()
    return json.loads(text)


def test_the_page_loads_nothing_but_its_figures(busy):
    headers, text = read(busy.status_url())
    assert headers["content-type"] == "text/html; charset=utf-8"
    policy, [nonce, again] = headers["content-security-policy"], re.findall(r'nonce="([^"]+)"', text)
    assert f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self';" in policy
    assert again == nonce
    assert read(busy.status_url())[0]["content-security-policy"] != policy, "a nonce is used once"
    assert re.findall(r"<(script|link|img|iframe|a|form|object)\b", text) == ["script"]
    assert not re.search(r"<[^>]*\s(src|href|style|on\w+)=", text)


def test_the_figures_are_of_everything_that_goes_on(busy):
    shown = figures(busy)
    assert json.loads(read(busy.metadata() + "?json")[1]).keys() == shown.keys(), (
        "the URL in the metadata leads there, too"
    )
    assert (shown["step"], shown["allowed"], shown["program"]) == (7, True, None)
    assert shown["ended"][0]["error"].startswith("WrongStep, of 127.0.0.1:")
    assert shown["ended"][1]["error"] is None
    assert (shown["received"]["healed"], shown["received"]["failed"]) == (1, 1)
    messages = [refusal["message"] for refusal in shown["refusals"]]
    assert any("serving 7 but got step=5" in message for message in messages)
    assert any("x&\"'{onload=alert(1)}" in message for message in messages)
    busy.disallow_checkpoint()
    assert figures(busy)["allowed"] is False


@pytest.mark.process
@pytest.mark.skipif(shutil.which("node") is None, reason="no node is installed: nothing here runs scripts")
def test_the_script_shows_the_figures_as_text(busy):
    text = read(busy.status_url())[1]
    script = text.partition("<script")[2].partition(">")[2].partition("</script>")[0]
    shown = subprocess.run(
        ["node", "-e", DOCUMENT + script], input=json.dumps(figures(busy)), capture_output=True, text=True, timeout=60
    )
    assert not shown.stderr
    for what in ("tensorferry: step 7", "the gate is open", "failed: WrongStep, of 127.0.0.1:", "1 healed, 1 failed",
                 "serving 7 but got step=5", "x&\"'{onload=alert(1)}"):  # fmt: skip
        assert what in shown.stdout, what


def test_only_the_latest_refusals_are_kept(busy):
    for number in range(40):
        ask(busy, b"y" * 5000 + b"/%d/" % number)
    shown = json.dumps(figures(busy))
    assert shown.count("invalid url format") == 16
    assert len(shown) < 16_000
