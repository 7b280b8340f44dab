"""Which URLs are taken, what they name, and that no message shows what may be secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorferry.checkpointing import load_file
from tensorferry.errors import InvalidArgument
from tensorferry.storage.objects.answers import what_was_said
from tensorferry.storage.objects.url import parsed, without_secrets
from tensorferry.storage.places import any_place


@pytest.mark.parametrize(
    ("text", "root", "key"),
    [
        ("s3://bucket/run/step-1", "s3://bucket", "run/step-1"),
        ("S3://bucket/", "s3://bucket", ""),
        ("gs://a.b-c/x y/ü%20", "gs://a.b-c", "x y/ü%20"),
        ("az://container/x/", "az://container", "x"),
        ("abfss://box@account.dfs.core.windows.net/x", "abfss://box@account.dfs.core.windows.net", "x"),
    ],
)
def test_the_parts_of_a_url(text, root, key):
    assert parsed(text) == (root, key)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("s3://user:SECRET@bucket/x", "no user"),
        ("s3://SECRET@bucket/x", "no user"),
        ("abfss://box:SECRET@account.dfs.core.windows.net/x", "no user"),
        ("s3://bucket/x?X-Amz-Signature=SECRET", "no query"),
        ("s3://bucket/x#SECRET", "bucket/x: path must have no query and no fragment: what stands behind its first"),
        ("s3:///x", "no bucket"),
        ("s3://bucket/a/../b", "no dots"),
        ("s3://bucket/a//b", "empty names"),
        ("s3://bucket/a\nb", "control"),
        ("s3://bucket/a\ud800b", "surrogate"),
    ],
)
def test_a_url_that_is_refused(text, why):
    with pytest.raises(InvalidArgument, match=why) as raised:
        any_place(text)
    assert "SECRET" not in str(raised.value)


def test_secrets_in_a_text_are_left_out():
    text = "GET https://me:pw@host:1/b/k?X-Amz-Signature=abc&x=1 failed, then s3://b/k"
    assert without_secrets(text) == "GET https://host:1/b/k failed, then s3://b/k"


def test_what_a_store_said_is_told_without_the_url():
    text = (
        "Generic S3 error: Error performing PUT http://h/b/503/k?partNumber=3&uploadId=xyz in 1ms - Server returned "
        "non-2xx status code: 400 Bad Request: <Error><Code>Bad</Code><Message>no</Message></Error>"
        "\n\nDebug source:\nxyz"
    )
    assert what_was_said(text) == "status 400, Bad (no)"


def test_a_url_that_was_a_path_object_says_so():
    for call in (any_place, load_file):
        with pytest.raises(InvalidArgument, match="give it as text"):
            call(Path("s3://bucket/x"))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'tensorferry\[objects\]'"):
        any_place("s3://bucket/x")
