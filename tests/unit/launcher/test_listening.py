"""Where the stores of a job listen: on the address by which nodes reach them, and on no other one."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

from flashckpt.daemon.launcher import rendezvous_store

EVERYWHERE = {"00000000", "0" * 32}


def listening_on(port: int) -> set[str]:
    """Addresses, as /proc/net has them, on which this process listens at a port."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(str(fd.readlink()))
        except OSError:
            continue
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    mine = [words[1] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in inodes]
    return {address for address, _, number in (one.partition(":") for one in mine) if int(number, 16) == port}


@pytest.mark.parametrize(("host", "address"), [("127.0.0.2", "0200007F"), ("localhost", "0100007F")])
def test_store_listens_on_its_address_alone_and_serves_there(host: str, address: str) -> None:
    server = rendezvous_store.workers_store(host, 0)
    assert listening_on(server.port) == {address}
    TCPStore(host, server.port, is_master=False, wait_for_workers=False).set("key", "value")
    assert server.get("key") == b"value"


def test_server_of_torch_listens_everywhere() -> None:
    """Otherwise the test above would show nothing."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert listening_on(server.port) & EVERYWHERE


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="needs IPv6")
def test_store_at_an_ipv6_address() -> None:
    server = rendezvous_store.workers_store("::1", 0)
    assert listening_on(server.port) == {"0" * 24 + "01000000"}
    TCPStore("::1", server.port, is_master=False, wait_for_workers=False).set("key", "value")


def test_port_that_is_taken_is_one_error() -> None:
    server = rendezvous_store.workers_store("127.0.0.1", 0)
    with pytest.raises(DistNetworkError, match=f"127.0.0.1 port {server.port}: "):
        rendezvous_store.workers_store("127.0.0.1", server.port)


def names(*addresses: str) -> Any:
    def found(_host: str, port: int | None, **_rest: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, port or 0)) for address in addresses]

    return found


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        ((), "the name is not known here"),
        (("127.0.1.1",), "means 127.0.1.1, which other nodes cannot reach"),
        (("192.0.2.1",), "192.0.2.1 is not an address of this machine"),
        (("127.0.0.2", "::1"), "several addresses (127.0.0.2, ::1)"),
    ],
)
def test_address_that_is_not_known_or_not_local_means_all_and_one_line_says_so(
    addresses: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = f"node-{os.urandom(4).hex()}"
    monkeypatch.setattr(socket, "getaddrinfo", names(*addresses))
    with caplog.at_level(logging.WARNING, "flashckpt.dlrun"):
        assert [rendezvous_store.listener(host, 0), rendezvous_store.listener(host, 0)] == [None, None]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"listening on all addresses, not only that of {host}: ")
    assert reason in record.getMessage()


def test_address_of_another_machine_as_it_is_given(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flashckpt.dlrun"):
        assert rendezvous_store.listener("192.0.2.7", 0) is None
    assert "192.0.2.7 is not an address of this machine" in caplog.text
