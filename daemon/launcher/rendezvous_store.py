"""Stores that listen only where nodes connect, and a new one for the workers of each generation.

torch's servers listen on all addresses, and its rendezvous returns the old store in every generation.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import logging
import socket
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from flashckpt.daemon.launcher.sealed_store import SealedStore
from flashckpt.errors import ConfigError

_log = logging.getLogger("flashckpt.dlrun")
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
        return tcp_store(host, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise ConfigError(
            "the port of the workers' store cannot be used",
            found=str(error),
            remedy="give another --master-port, or omit it: dlrun then takes a free one",
        ) from error


def listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on the address of `host` alone; None, which is logged, where only all addresses will do.

    Raises:
        DistNetworkError: the port is taken.
    """
    address, reason = _reached_at(host)
    if not address:
        return _on_all(host, reason)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return _on_all(host, f"{address} is not an address of this machine (NAT, or the name of a service)")
        raise DistNetworkError(f"{address} port {port}: {error.strerror or error}") from error


def seat(host: str) -> socket.socket | None:
    """Return a socket that listens as long as this process runs, for others to see that it does; None where `host` leads elsewhere."""
    address, _ = _reached_at(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        made = socket.create_server((address, 0), family=family, backlog=64) if address else None
    except OSError:
        return None
    if made is not None:
        made.settimeout(0.0)
    return made


def _reached_at(host: str) -> tuple[str, str]:
    """Return the address by which other nodes reach this one under that name, or why it is not known.

    A name may lead other nodes elsewhere: a machine often has a loopback address for its own, or the name several.
    """
    if host == "localhost":
        return loopback(), ""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host)), ""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        return "", f"the name is not known here ({error})"
    if len(found) > 1:
        return "", f"the name has several addresses ({', '.join(sorted(found))})"
    (address,) = found
    if ipaddress.ip_address(address).is_loopback:
        return "", f"on this machine the name means {address}, which other nodes cannot reach"
    return address, ""


@functools.cache  # once for each host and reason, not again in every generation
def _on_all(host: str, reason: str) -> None:
    _log.warning("listening on all addresses, not only that of %s: %s", host, reason)


def tcp_store(host: str, port: int, *args: Any, is_master: bool = False, **rest: Any) -> TCPStore:
    """Stand in for torch's TCPStore: a server listens on the address of `host` alone, where there is one.

    Raises:
        DistNetworkError: the port is taken.
    """
    if args:  # as the static rendezvous calls it
        (rest["world_size"], is_master, rest["timeout"]) = args
    if is_master and (sock := listener(host, port)) is not None:
        port = int(sock.getsockname()[1])
        rest["master_listen_fd"] = sock.detach()  # the store closes it
    return TCPStore(host, port, is_master=is_master, **rest)


def workers_store(host: str, port: int) -> TCPStore:
    """Stand in for the server that torch's rendezvous makes for the workers."""
    return tcp_store(host, port, is_master=True, wait_for_workers=False)


def of_static(
    info: RendezvousInfo, run_id: str, number: int, sign: Callable[..., SealedStore]
) -> tuple[RendezvousInfo, TCPStore | None]:
    """Return round `number` with a store whose values are signed; after the first one with a new port for the workers.

    Args:
        info: The store of torch's static rendezvous, which has the same store in every round.
        run_id: The job's id.
        number: The round's number, from 0.
        sign: Makes a signed store of a store and its purpose.
    """
    server, first = None, info.bootstrap_store_info
    assert first is not None  # the static rendezvous sets it
    store = sign(PrefixStore(f"flashckpt/round{number}", info.store), purpose=f"static {run_id} {number}")
    if not number:
        return _with(store, info, first), None
    address = str(first.master_addr)
    if info.rank == 0:
        server = workers_store(address, 0)
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
