"""Prometheus metrics of the daemon, only where FLASHCKPT_METRICS_PORT is set; on FLASHCKPT_METRICS_HOST, loopback by default."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from socketserver import TCPServer
from typing import Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from flashckpt import __version__
from flashckpt.acceptor import Acceptor
from flashckpt.daemon.persister.coordinator import PersistCoordinator
from flashckpt.environment import env
from flashckpt.shm.control import PHASES, RESTORED_FROM
from flashckpt.shm.inventory import NodeInventory

_log = logging.getLogger(__name__)
LABELS = ("job", "node")
LOOPBACK = "127.0.0.1"
AGAIN_S = 10.0
"""Seconds between two attempts to listen."""
EXCHANGE_S = 5.0
"""Seconds of silence after which a scrape is given up."""
MOST_SCRAPES = 64


class Observed(Protocol):
    """What is shown: numbers by name, read at each scrape."""

    def numbers(self) -> Mapping[str, float]:
        """Return the current value of every name in GAUGES and COUNTERS that is known."""


GAUGES = {
    "committed_step": "Step of the newest committed checkpoint.",
    "committed_generation": "Generation of the newest committed checkpoint.",
    "committed_age_seconds": "Seconds since this daemon last saw a commit.",
    "snapshot_step": "Step of the newest snapshot that every rank of this node holds in memory.",
    "snapshot_generation": "Generation of that snapshot.",
    "suspect_snapshots": "Snapshots in this node's memory in which numbers became NaN or infinite.",
    "norm": "Norm of all finite numbers that this node wrote of the newest committed checkpoint.",
    "largest_number": "Largest magnitude of these numbers.",
    "lag_persist_steps": "Persist steps that are complete in memory and not committed.",
    "persisting": "1 while a snapshot is being persisted.",
    "failing": "1 while the last attempt to persist failed.",
    "segment_bytes": "Shared memory reserved by the segments of this node.",
    "replicated_step": "Step of the newest snapshot that the partners of all nodes hold in memory.",
    "replicated_generation": "Generation of that snapshot.",
    "replica_lag_steps": "Steps that the newest snapshot is ahead of the newest replicated one.",
    "replica_lag_seconds": "Seconds since this node held a snapshot that was not replicated everywhere.",
    "replica_pending_bytes": "Bytes of the snapshot under way that the partners of this node lack.",
    "replica_failing": "1 while no replica can be sent.",
    "replica_bytes": "Shared memory that replicas of other nodes take on this node.",
    "goodput_ratio": "Share of the job's time that was neither down nor spent on steps that were lost.",
    "first_step_seconds": "Seconds from the start of the slowest rank's program to its first step.",
    "slow_ranks": "Ranks that dlrun has named as slow, and that have not recovered.",
    "build_info": "1; the release is a label.",
    "ranks_alive": "1 while a rank or agent of the job is running on this node.",
}
COUNTERS = {
    "commits": "Checkpoints committed, as seen by this daemon.",
    "given_up": "Snapshots whose persist was given up.",
    "skipped_persist_steps": "Persist steps skipped because another one was being persisted.",
    "failures": "Attempts to persist that failed.",
    "persisted_bytes": "Bytes of tensors in snapshots that this node persisted.",
    "replica_sent_bytes": "Bytes of replicas sent to partners.",
    "persist_seconds": "Seconds from intent to commit, summed over commits.",
    "lost_steps": "Steps that were trained and lost by restarts, since the job began.",
    "down_seconds": "Seconds from the last sign of a session to the first step of the next one, since the job began.",
    "snapshots": "Snapshots begun by the rank of this node that waited longest for them, in this session.",
    "stall_seconds": "Seconds that the training of that rank waited for snapshots, in this session.",
    "restarts": "Restarts since the job began, by cause.",
}


RESTORE = "Seconds of that start which the slowest restore took, by the farthest source of any rank."
PHASE = "Seconds of each step that the median rank spends in a phase, over its last steps."
CAUSES = ("signal", "exit", "hang", "other", "unknown")
"""Values of the label `cause`: few, whatever the text of a cause says."""


def class_of(cause: str) -> str:
    """Return which of CAUSES a text of `history.cause_of` belongs to."""
    if cause.startswith("hang"):
        return "hang"
    if "SIG" in cause or "killed" in cause:
        return "signal"
    if "exit code" in cause:
        return "exit"
    return "unknown" if cause.startswith("not known") else "other"


class _Collector:
    def __init__(self, observed: Observed, labels: tuple[str, str]) -> None:
        self._observed, self._labels = observed, labels

    def collect(self) -> Iterable[Metric]:
        """Yield one family per known number."""
        numbers = self._observed.numbers()
        for name, text in GAUGES.items():
            if name in numbers:
                more = {"version": __version__} if name == "build_info" else {}
                gauge = GaugeMetricFamily(f"flashckpt_{name}", text, labels=(*LABELS, *more))
                gauge.add_metric((*self._labels, *more.values()), numbers[name])
                yield gauge
        for name, text in COUNTERS.items():
            if name in numbers:
                counter = CounterMetricFamily(f"flashckpt_{name}", text, labels=LABELS)
                counter.add_metric(self._labels, numbers[name])
                yield counter
        restarts = CounterMetricFamily("flashckpt_restarts", COUNTERS["restarts"], labels=(*LABELS, "cause"))
        restore = GaugeMetricFamily("flashckpt_restore_seconds", RESTORE, labels=(*LABELS, "source"))
        phase = GaugeMetricFamily("flashckpt_phase_seconds", PHASE, labels=(*LABELS, "phase"))
        by_value = (
            (restarts, "restarts", CAUSES),
            (restore, "restore_seconds", RESTORED_FROM),
            (phase, "phase_seconds", PHASES),
        )
        for family, name, values in by_value:
            for value in values:
                if f"{name}_{value}" in numbers:
                    family.add_metric((*self._labels, value), numbers[f"{name}_{value}"])
            yield family


def families(observed: Observed, job: str, node: int) -> Iterable[Metric]:
    """Return what is observed now as Prometheus has it."""
    return _Collector(observed, (job, str(node))).collect()


class _QuietHandler(WSGIRequestHandler):
    timeout = EXCHANGE_S

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _Server(WSGIServer):
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        """Bind without asking a name service for this machine's name, which may not answer for seconds."""
        super().__init__(address, handler, bind_and_activate=False)
        try:
            TCPServer.server_bind(self)
            self.server_activate()
        except BaseException:
            self.server_close()
            raise
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class Endpoint:
    """A metrics endpoint until `close`."""

    def __init__(self, observed: Observed, *, job: str, node: int, port: int, host: str = LOOPBACK) -> None:
        registry = CollectorRegistry()
        registry.register(_Collector(observed, (job, str(node))))
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        server = type("_FamilyServer", (_Server,), {"address_family": family})
        self._server: WSGIServer = make_server(
            str(address[0]), port, make_wsgi_app(registry), server_class=server, handler_class=_QuietHandler
        )
        try:
            self._acceptor = Acceptor(
                self._server.socket, self._server.finish_request, name="flashckpt-scrape", most=MOST_SCRAPES
            )
        except RuntimeError:
            self._server.server_close()
            raise
        self.host = host
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop serving and join the thread."""
        self._acceptor.close()
        self._server.server_close()


class Scrapes:
    """The endpoint where one is asked for; tries again while it cannot listen: the port may be held by a daemon that ends.

    Args:
        report: Called with a sentence where there are no metrics though they are asked for, and with "" when there are.
    """

    def __init__(self, observed: Observed, report: Callable[[str], None]) -> None:
        self.endpoint: Endpoint | None = None
        self._observed, self._report = observed, report
        self._problem, self._again_s = "", float("-inf")

    def turn(self, *, job: str, node: int) -> None:
        """Listen, if that is due."""
        if self.endpoint is not None or time.monotonic() < self._again_s:
            return
        self._again_s = time.monotonic() + AGAIN_S
        problem: list[str] = []
        self.endpoint = serve(self._observed, job=job, node=node, report=problem.append)
        if (now := "".join(problem)) != self._problem:
            self._problem = now
            self._report(now)

    def close(self) -> None:
        """Stop serving."""
        if self.endpoint is not None:
            self.endpoint.close()


def serve(
    observed: Observed, *, job: str, node: int, report: Callable[[str], None] = lambda _: None
) -> Endpoint | None:
    """Start the endpoint if FLASHCKPT_METRICS_PORT is set, None where it is not.

    It listens on FLASHCKPT_METRICS_HOST, which is the loopback address unless it is set: anybody who can reach the port can
    read it. Node k of several on one machine takes port + k. An address or port that cannot be used costs only the
    metrics, and a warning, which `report` gets too.
    """
    wanted, host = env.FLASHCKPT_METRICS_PORT, env.FLASHCKPT_METRICS_HOST
    if wanted is None:
        return None
    try:
        endpoint = Endpoint(observed, job=job, node=node, port=wanted + node if wanted else 0, host=host)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        problem = f"no metrics: port {wanted} on {host} cannot be used ({error})"
        _log.warning("%s", problem)
        report(problem)
        return None
    shown = f"[{host}]" if ":" in host else host
    _log.info("metrics at http://%s:%d/metrics", shown, endpoint.port)
    return endpoint


def numbers_of(
    persisting: PersistCoordinator, view: NodeInventory, *, is_alive: bool, lag: int, failures: int, error: str
) -> dict[str, float]:
    """Return what is shown of the memory and the persists of this node, by the names of GAUGES and COUNTERS."""
    newest = max(view.complete(), default=None)
    found = {
        "build_info": 1,
        "lag_persist_steps": lag,
        "persisting": persisting.flush is not None,
        "failing": bool(error),
        "suspect_snapshots": len(view.suspect()),
        "segment_bytes": view.reserved_bytes,
        "ranks_alive": is_alive,
        "failures": failures,
        "skipped_persist_steps": persisting.skipped,
        **vars(persisting.totals),
    }
    if newest is not None:
        found |= {"snapshot_generation": newest[0], "snapshot_step": newest[1]}
    if persisting.committed is not None:
        found |= {"committed_generation": persisting.committed[0], "committed_step": persisting.committed[1]}
    if persisting.committed_s is not None:
        found["committed_age_seconds"] = time.monotonic() - persisting.committed_s
    return {name: float(value) for name, value in found.items()}
