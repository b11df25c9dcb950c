"""Metrics to an OpenTelemetry collector: the names of Prometheus, from a persister to a small receiver, and what a dead one costs."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.daemons import daemon_of, turn_until
from support.memory_tier import FakeJob

from flashckpt.daemon.persister.metrics import families
from flashckpt.hooks import otlp
from flashckpt.hooks.otlp import OtlpPush, as_otlp


class Numbers:
    def numbers(self) -> dict[str, float]:
        return {
            "goodput_ratio": 0.9,
            "lost_steps": 7,
            "restarts_signal": 2,
            "restore_seconds_peer": 1.5,
            "build_info": 1,
        }


def told(found: dict[str, Any]) -> dict[str, Any]:
    (resource,) = found["resourceMetrics"]
    assert resource["resource"]["attributes"] == [{"key": "service.name", "value": {"stringValue": "flashckpt"}}]
    (scope,) = resource["scopeMetrics"]
    return {one["name"]: one for one in scope["metrics"]}


def test_names_labels_and_kinds_are_those_of_prometheus() -> None:
    found = told(as_otlp(families(Numbers(), "run7", 3), 5, 9))
    assert found["flashckpt_lost_steps_total"]["sum"] == {
        "dataPoints": [
            {"attributes": [{"key": "job", "value": {"stringValue": "run7"}}, {"key": "node", "value": {"stringValue": "3"}}],
             "timeUnixNano": "9", "asDouble": 7.0, "startTimeUnixNano": "5"}
        ],
        "aggregationTemporality": 2,
        "isMonotonic": True,
    }  # fmt: skip
    (restarts,) = found["flashckpt_restarts_total"]["sum"]["dataPoints"]
    assert {"key": "cause", "value": {"stringValue": "signal"}} in restarts["attributes"]
    assert found["flashckpt_goodput_ratio"]["gauge"]["dataPoints"][0]["asDouble"] == 0.9
    assert set(found) == {
        f"flashckpt_{name}"
        for name in ("goodput_ratio", "build_info", "lost_steps_total", "restarts_total", "restore_seconds")
    }


@pytest.fixture
def received() -> Iterator[tuple[str, list[Any]]]:
    got: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/metrics", got
        server.shutdown()
        thread.join()


def test_a_persister_pushes_what_it_measures(
    received: tuple[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, got = received
    monkeypatch.setenv("FLASHCKPT_OTLP_URL", url)
    monkeypatch.setattr(otlp, "EVERY_S", 0.0)
    job = FakeJob(str(tmp_path / "root"))
    job.step(20, persist=True)
    with daemon_of(job) as daemon:
        turn_until(
            daemon,
            lambda: any("flashckpt_committed_step" in told(one) for one in list(got)),
            "a commit at the collector",
        )
    job.die()
    (point,) = told(got[-1])["flashckpt_committed_step"]["gauge"]["dataPoints"]
    assert point["asDouble"] == 20.0


def test_a_dead_collector_is_named_once_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHCKPT_OTLP_URL", "http://127.0.0.1:9/secret")
    monkeypatch.setattr(otlp, "EVERY_S", 0.0)
    push: Any = OtlpPush(None, lambda: None)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "flashckpt.daemon"):
        for _ in range(3):
            push.observe(lambda: families(Numbers(), "run7", 0))
            push.close()
    assert len(caplog.messages) == 1
    assert "do not reach FLASHCKPT_OTLP_URL" in caplog.text
    assert "secret" not in caplog.text
    monkeypatch.setattr(otlp, "EVERY_S", 60.0)
    push.observe(lambda: pytest.fail("too early"))
    assert push._begun_ns <= time.time_ns()


def test_without_a_collector_nothing_is_measured() -> None:
    OtlpPush(None, lambda: None).observe(lambda: pytest.fail("asked"))  # type: ignore[arg-type]
