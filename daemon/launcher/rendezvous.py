"""The rendezvous that the agents of a job use in place of torch's.

One node needs none: its agent keeps torch's state in an in-process store, and the workers' store listens on the
loopback address. Several nodes meet in a c10d store whose state is signed (shared_state).
"""

from __future__ import annotations

import logging
import math
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings, _NodeDesc, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from flashckpt.daemon.launcher import job_secret, rendezvous_store
from flashckpt.daemon.launcher.elastic_compat import replaced
from flashckpt.daemon.launcher.job_secret import Seal
from flashckpt.daemon.launcher.shared_state import SharedState
from flashckpt.daemon.launcher.silence import BEAT_S

_log = logging.getLogger("flashckpt.dlrun")


class OneNode(RendezvousHandler):
    """The rendezvous of a single node (--nnodes 1): no communication, and nobody can connect.

    Args:
        run_id: The job's id.
        backend: The user's name of the backend, for torch's events.
        port: Port of the first generation's workers' store; 0 takes a free one, as every later generation does.
    """

    def __init__(self, run_id: str, backend: str, port: int = 0) -> None:
        self._run_id, self._backend, self._port = run_id, backend, port
        self._server: TCPStore | None = None
        self._rounds = 0

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent hosts the workers' store: always."""
        return True

    def get_backend(self) -> str:
        """Return the name the user gave."""
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round: this node, a store in this process, a new store for the workers."""
        self._server = None  # the given port is free again
        self._server = rendezvous_store.on_loopback(0 if self._rounds else self._port)
        store = PrefixStore(f"round{self._rounds}", HashStore())
        self._rounds += 1
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._server.host, self._server.port))

    def is_closed(self) -> bool:
        """Return False: no other node could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other node to inform."""

    def num_nodes_waiting(self) -> int:
        """Return 0."""
        return 0

    def get_run_id(self) -> str:
        """Return the run id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True."""
        return True


def handler_of(
    params: RendezvousParameters, theirs: Callable[[RendezvousParameters], RendezvousHandler]
) -> RendezvousHandler:
    """Return the rendezvous of a job; any but the single-node and c10d ones are torch's own (`theirs`).

    Raises:
        ConfigError: the job secret cannot be used.
    """
    if params.max_nodes == 1 and params.backend in {"c10d", "static"}:
        port = parse_rendezvous_endpoint(params.endpoint, 0)[1] if params.backend == "static" else 0
        return OneNode(params.run_id, params.backend, port)
    secret = job_secret.read_secret()
    if not secret:
        _log.warning(
            "several nodes and no job secret: anybody who can reach the port of the rendezvous (%s) can disturb this job;"
            " set %s to the same value on all nodes, and close the ports of the nodes to others",
            params.endpoint,
            job_secret.VARIABLE,
        )
    return _several_nodes(params, secret) if params.backend == "c10d" else theirs(params)


def _several_nodes(params: RendezvousParameters, secret: bytes) -> RendezvousHandler:
    served: list[bool] = []

    def tcp_store(*args: Any, is_master: bool = False, **rest: Any) -> TCPStore:
        made = rendezvous_store.tcp_store(*args, is_master=is_master, **rest)
        served.append(is_master)
        return made

    dynamic_rendezvous.get_method_name = _caller
    with replaced(c10d_rendezvous_backend, "TCPStore", tcp_store):
        backend, store = create_backend(params)
    handler = create_handler(store, backend, params)
    handler.serves_job = any(served)  # type: ignore[attr-defined]  # as who may not leave: the store ends with its process
    handler._create_tcp_store_server = rendezvous_store.workers_store  # type: ignore[assignment,method-assign]  # noqa: SLF001 -- torch offers no other way in
    seal = Seal(secret, f"rendezvous {params.run_id}")
    node = handler._this_node  # noqa: SLF001 -- torch offers no other way in
    # a state of an earlier launch never names this node, not even if its address and process id are the same
    node = handler._this_node = _NodeDesc(node.addr, node.pid, secrets.randbits(62))  # noqa: SLF001 -- the same
    handler._settings = _with_frequent_beats(handler.settings)  # noqa: SLF001 -- the same
    seat = rendezvous_store.seat(node.addr)
    handler._state_holder = SharedState(store, handler.settings, seal, node, seat)  # noqa: SLF001 -- the same
    return handler


def _caller(depth: int = 2) -> str:
    """Return the name of a function above, as torch does, which reads the source of the whole stack for it: 20 ms at each step of a round."""
    return sys._getframe(depth).f_code.co_name  # noqa: SLF001 -- the call that inspect itself makes


def _with_frequent_beats(settings: RendezvousSettings) -> RendezvousSettings:
    """Return settings with the same limit for a silent node whose machine answers, and more keep-alive messages within it."""
    patience = settings.keep_alive_interval * settings.keep_alive_max_attempt
    interval = min(settings.keep_alive_interval, timedelta(seconds=BEAT_S))
    return replace(settings, keep_alive_interval=interval, keep_alive_max_attempt=math.ceil(patience / interval))
