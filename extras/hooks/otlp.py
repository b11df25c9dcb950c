"""Pushes the metrics of Prometheus to an OpenTelemetry collector, under the same names: OTLP over HTTP, as JSON.

A push that fails costs itself alone and is named once; the persister waits for none.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flashckpt.environment import env
from flashckpt.printable import printable
from flashckpt.shm.job_directory import JobDirectory

EVERY_S, LIMIT_S = 15.0, 5.0
"""Seconds between two pushes, and for which one is waited."""
_CUMULATIVE = 2
_log = logging.getLogger("flashckpt.daemon")


class OtlpPush:
    """Extension of the persister, where FLASHCKPT_OTLP_URL is set."""

    def __init__(self, directory: JobDirectory, wake: Callable[[], None]) -> None:
        del directory, wake
        self._url, self._problem = env.FLASHCKPT_OTLP_URL, ""
        self._begun_ns, self._pushed_s = time.time_ns(), float("-inf")
        self._thread: threading.Thread | None = None

    def turn(self, *_: Any) -> None:
        """Do nothing: see `observe`."""

    def observe(self, families: Callable[[], Iterable[Any]]) -> None:
        """Push what is measured now, where that is due and the push before has ended."""
        is_due = self._url and time.monotonic() - self._pushed_s >= EVERY_S
        if not is_due or (self._thread is not None and self._thread.is_alive()):
            return
        self._pushed_s = time.monotonic()
        body = json.dumps(as_otlp(families(), self._begun_ns, time.time_ns())).encode()
        self._thread = threading.Thread(target=self._push, args=(body,), name="flashckpt-otlp", daemon=True)
        self._thread.start()

    def _push(self, body: bytes) -> None:
        from urllib import request  # here: a persister without a collector needs none of it

        problem = ""
        try:
            asked = request.Request(self._url, body, {"Content-Type": "application/json", "User-Agent": "flashckpt"})  # noqa: S310
            with request.urlopen(asked, timeout=LIMIT_S):  # noqa: S310 -- the user's URL
                pass
        except (OSError, ValueError) as error:  # the URL is not named: it may hold a secret
            problem = str(getattr(error, "reason", error))
        if problem and problem != self._problem:
            _log.warning("metrics do not reach FLASHCKPT_OTLP_URL: %s", printable(problem))
        self._problem = problem

    def report(self, trouble: str) -> tuple[Mapping[str, Any], Mapping[str, float]]:
        """Return nothing."""
        del trouble
        return {}, {}

    def close(self) -> None:
        """Wait for the push under way."""
        if self._thread is not None:
            self._thread.join(LIMIT_S)


def as_otlp(families: Iterable[Any], begun_ns: int, now_ns: int) -> dict[str, Any]:
    """Return an ExportMetricsServiceRequest of Prometheus' families, as its JSON: counters are sums since `begun_ns`."""
    metrics = []
    for family in families:
        is_counter = family.type == "counter"
        name = family.name + "_total" * is_counter
        points = [
            {
                "attributes": _attributes(one.labels),
                "timeUnixNano": str(now_ns),
                "asDouble": float(one.value),
                **({"startTimeUnixNano": str(begun_ns)} if is_counter else {}),
            }
            for one in family.samples
        ]
        kind = {"aggregationTemporality": _CUMULATIVE, "isMonotonic": True} if is_counter else {}
        if points:
            key = "sum" if is_counter else "gauge"
            metrics.append({"name": name, "description": family.documentation, key: {"dataPoints": points} | kind})
    scope = {"scope": {"name": "flashckpt"}, "metrics": metrics}
    resource = {"attributes": _attributes({"service.name": "flashckpt"})}
    return {"resourceMetrics": [{"resource": resource, "scopeMetrics": [scope]}]}


def _attributes(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in sorted(labels.items())]
