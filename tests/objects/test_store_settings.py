"""What is said of a store in options and in the environment reaches the client."""

from __future__ import annotations

import os

import pytest
import torch
from dcp_doors import save

from stores import KEYS, Gateway, objects
from tensorferry.dcp import FileWriter, own_errors
from tensorferry.errors import InvalidArgument
from tensorferry.storage.objects import client
from tensorferry.storage.objects.client import options_of
from tensorferry.storage.objects.settings import of_s3

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def settings_of_the_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


def options(url, **more):
    return {"endpoint": url, **{name.lower(): value for name, value in KEYS.items()}, **more}


def test_all_requests_go_to_the_endpoint_of_the_options(server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    save({"w": torch.ones(3)}, server.place, store_options=options(server.url))
    assert len(objects(server.url, server.prefix)) == 3


@pytest.mark.parametrize(
    ("said", "signs"),
    [({}, True), ({"unsigned_payload": True}, False), ({"checksum_algorithm": "SHA256"}, True)],
    ids=["without TLS", "where the options say otherwise", "beside another checksum"],
)
def test_bodies_have_a_checksum_that_is_signed_and_are_signed_themselves_where_that_is_said(server, said, signs):
    with Gateway(server.url) as there:
        save({"w": torch.ones(3)}, server.place, store_options={**options(there.url), **said})
        puts = [headers for (method, _), headers in zip(there.seen, there.headers, strict=True) if method == "PUT"]
    assert len(puts) == 3
    for headers in puts:
        name = "x-amz-checksum-sha256" if "checksum_algorithm" in said else "x-amz-checksum-crc64nvme"
        assert name in headers
        assert name in headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
        assert (headers["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD") == signs


@pytest.mark.parametrize("said", [None, "true", "false"])
def test_bodies_are_signed_as_the_environment_says_and_else_without_tls(said, monkeypatch):
    monkeypatch.delenv("AWS_UNSIGNED_PAYLOAD", raising=False)
    if said is not None:
        monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", said)
    for scheme, by_default in (("https", "true"), ("http", None)):
        made = client.client_of("s3://bucket", {"endpoint": f"{scheme}://127.0.0.1:9", "region": "x"}, 5.0).store
        assert made.config.get("unsigned_payload") == (by_default if said is None else None)


def test_an_endpoint_that_the_library_would_not_take_is_refused(server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(InvalidArgument, match="AWS_ENDPOINT_URL_S3 another one"), own_errors():
        FileWriter(server.place, store_options=options(server.url))


def test_options_come_before_the_environment(monkeypatch):
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "there")
    monkeypatch.setenv("AWS_ENDPOINT", "http://there")
    assert of_s3({"checksum_algorithm": "here"}) == {"checksum": "here", "endpoint": "http://there"}
    for name in ("endpoint_url", "aws_endpoint", "AWS_ENDPOINT_URL"):
        assert of_s3({name: "http://here"})["endpoint"] == "http://here"
    assert of_s3(options_of({"config": {"endpoint": "http://here"}}))["endpoint"] == "http://here"


def test_a_panic_of_the_library_is_an_error_of_ours():
    with pytest.raises(InvalidArgument, match="cannot be opened"):
        FileWriter("s3://bucket/x", store_options={"allow_http": "true"})
