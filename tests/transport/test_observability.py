"""What a receive leaves behind for people: a report, log lines, spans."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch

from tensorferry import ConnectError, HTTPTransport, ReceiveReport

TIMEOUT = timedelta(seconds=30)

pytestmark = pytest.mark.beyond_torchft


def state(step=1):
    return {"w": torch.full((1 << 19,), float(step)), "step": step}


@pytest.fixture
def pair(open_transport):
    source = open_transport(interface="127.0.0.1", same_host=False)
    return source, open_transport(interface="127.0.0.1", state_dict=state)


def test_the_report_of_the_last_receive(pair):
    source, healing = pair
    assert healing.last_report is None
    source.send_checkpoint([1], 3, state(3), TIMEOUT)
    healing.recv_checkpoint(0, source.metadata(), 3, TIMEOUT)
    report = healing.last_report
    assert isinstance(report, ReceiveReport)
    assert (report.step, report.retries, report.same_host, report.troubles) == (3, 0, False, {})
    assert report.bytes >= 2 << 20
    assert report.in_place is not None
    assert report.in_place.matched == report.in_place.offered == 1
    assert report.routes == (("127.0.0.1", "127.0.0.1"),)
    parts = report.open_seconds + report.fetch_seconds + report.build_seconds
    assert parts == pytest.approx(report.seconds, abs=1e-6)
    assert 0 < report.verify_seconds < report.fetch_seconds
    assert report.bytes_per_second == pytest.approx(report.bytes / report.fetch_seconds)
    with pytest.raises(AttributeError):
        report.step = 4
    # One that fails leaves it as it is, so that it is still that of the state that the trainer has.
    with pytest.raises(Exception, match="invalid checkpoint requested"):
        healing.recv_checkpoint(0, source.metadata(), 2, TIMEOUT)
    assert healing.last_report is report
    assert source.last_report is None


def test_the_log_of_a_heal_is_one_line(pair, caplog):
    source, healing = pair
    with caplog.at_level(logging.DEBUG):
        source.send_checkpoint([1], 3, state(3), TIMEOUT)
        healing.recv_checkpoint(0, source.metadata(), 3, TIMEOUT)
        source.disallow_checkpoint()
        source.send_checkpoint([1], 4, state(4), TIMEOUT)
        source.disallow_checkpoint()
        HTTPTransport(TIMEOUT, interface="127.0.0.1").shutdown()
    lines = [(r.levelno, r.getMessage()) for r in caplog.records if r.name.startswith("tensorferry")]
    loud = [line for line in lines if line[0] > logging.DEBUG]
    assert len(loud) == 1
    level, message = loud[0]
    assert level == logging.INFO
    assert message.startswith("received step 3: ")
    assert message.endswith("0 retries, without TLS, without a secret, 1 of 1 tensors in place")
    token = source.metadata().split("/")[3]
    assert not [message for _, message in lines if token in message], "a log line gives access to the state"


def test_a_failed_receive_raises_and_logs_nothing(pair, caplog):
    source, healing = pair
    metadata = source.metadata()
    source.shutdown()
    with caplog.at_level(logging.INFO), pytest.raises(ConnectError):
        healing.recv_checkpoint(0, metadata, 3, timedelta(seconds=5))
    assert not caplog.records


@pytest.fixture(scope="module")
def exporter():
    trace = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    return memory


def test_a_heal_is_a_tree_of_spans(pair, exporter):
    exporter.clear()
    source, healing = pair
    source.send_checkpoint([1], 3, state(3), TIMEOUT)
    healing.recv_checkpoint(0, source.metadata(), 3, TIMEOUT)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    parents = {
        "send": None,
        "receive": None,
        "open": "receive",
        "fetch": "receive",
        "verify": "fetch",
        "build": "receive",
    }
    assert spans.keys() == {f"tensorferry.{name}" for name in parents}
    for name, parent in parents.items():
        span = spans[f"tensorferry.{name}"]
        if parent is None:
            assert span.parent is None
            continue
        outer = spans[f"tensorferry.{parent}"]
        assert span.parent.span_id == outer.context.span_id
        assert outer.start_time <= span.start_time <= span.end_time <= outer.end_time, name
    receive = spans["tensorferry.receive"]
    assert receive.attributes["tensorferry.step"] == 3
    assert receive.attributes["tensorferry.bytes"] == healing.last_report.bytes
    token = source.metadata().split("/")[3]
    assert not [span for span in spans.values() if token in span.to_json()]
    # One that fails is a span with an error.
    exporter.clear()
    with pytest.raises(Exception, match="invalid checkpoint requested"):
        healing.recv_checkpoint(0, source.metadata(), 2, TIMEOUT)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert not spans["tensorferry.open"].status.is_ok
    assert spans["tensorferry.receive"].events[0].attributes["exception.type"].endswith("WrongStep")
