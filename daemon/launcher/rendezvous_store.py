"""A new, empty store for the workers of each generation (torch's own rendezvous return the old one)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from flashckpt.daemon.launcher.sealed_store import SealedStore
from flashckpt.errors import ConfigError

_PORT = "flashckpt/port"


def loopback() -> str:
    """Return the loopback address of this machine: 127.0.0.1, or ::1 where it has no IPv4."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError:
        with contextlib.suppress(OSError):
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
            return "::1"
    return "127.0.0.1"


def on_loopback(port: int = 0) -> TCPStore:
    """Return a server that only this machine can reach; for port 0 it chooses a free one.

    Raises:
        ConfigError: the port is taken.
    """
    host = loopback()
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            "the port of the workers' store cannot be used",
            found=f"{host} port {port}: {error.strerror or error}",
            remedy="give another --master-port, or omit it: dlrun then takes a free one",
        ) from error
    port = int(listener.getsockname()[1])
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def of_static(
    info: RendezvousInfo, run_id: str, number: int, seal: Callable[..., SealedStore]
) -> tuple[RendezvousInfo, TCPStore | None]:
    """Return round `number` with a store whose values are signed; after the first one with a new port for the workers.

    Args:
        info: Of torch's static rendezvous, which has the same store in every round.
        run_id: Of the job.
        number: Of the round, from 0.
        seal: Makes a signed store of a store and its purpose.
    """
    server, first = None, info.bootstrap_store_info
    assert first is not None  # the static rendezvous sets it
    store = seal(PrefixStore(f"flashckpt/round{number}", info.store), purpose=f"static {run_id} {number}")
    if not number:
        return _with(store, info, first), None
    address = str(first.master_addr)
    if info.rank == 0:
        server = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        store.set(_PORT, str(server.port))
    return _with(store, info, RendezvousStoreInfo(address, int(store.get(_PORT)))), server


def _with(store: SealedStore, info: RendezvousInfo, workers: RendezvousStoreInfo) -> RendezvousInfo:
    return RendezvousInfo(store, info.rank, info.world_size, workers)  # type: ignore[arg-type]  # it has what torch uses of a Store


class Forwarding(RendezvousHandler):
    """Delegates to another rendezvous what its subclasses do not override."""

    def __init__(self, inner: RendezvousHandler) -> None:
        self.inner = inner

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent hosts the workers' store."""
        return bool(self.inner.use_agent_store)

    def get_backend(self) -> str:
        """Return the inner backend's name."""
        return str(self.inner.get_backend())

    def is_closed(self) -> bool:
        """Return whether the rendezvous was closed for good."""
        return bool(self.inner.is_closed())

    def set_closed(self) -> None:
        """Close the rendezvous for good."""
        self.inner.set_closed()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def get_run_id(self) -> str:
        """Return the run id."""
        return str(self.inner.get_run_id())
