"""dlrun on a machine without IPv4: a network namespace whose only address is ::1."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.dlrun import ENGINE, traces

NO_IPV4 = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"'
BOTH = '"$@" > agent0.log 2>&1 & "$@" > agent1.log 2>&1; last=$?; wait $! && exit $last'

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and iproute2"),
]


def without_ipv4(folder: Path, *words: object, **environment: str) -> tuple[int, str]:
    command = ["unshare", "--net", "sh", "-c", NO_IPV4, "sh", *map(str, words)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **environment},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=350,
    )
    output = done.stdout.decode(errors="replace")
    if "unshare failed" in output or "Operation not permitted" in output:
        pytest.skip(f"no network namespace here: {output.strip()}")
    return done.returncode, output


def trained(folder: Path) -> bool:
    return all(sorted(rank) == list(range(1, 7)) for rank in traces(folder, 2))


def test_one_node_trains_and_checkpoints(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENGINE)
    words = (sys.executable, "-m", "flashckpt.daemon.run", "--nproc-per-node=2", script, tmp_path, 6, 0)
    code, output = without_ipv4(tmp_path, *words)
    assert code == 0, output
    assert trained(tmp_path)


def test_two_agents_meet_at_an_ipv6_address(tmp_path: Path) -> None:
    """gloo needs its interface named: without it, it falls back to 127.0.0.1 where the host name has no address."""
    script = tmp_path / "train.py"
    script.write_text(ENGINE)
    meet = ("--nnodes=2", "--rdzv-id=six", "--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:29431", "--local-addr=::1")
    words = (sys.executable, "-m", "flashckpt.daemon.run", *meet, "--nproc-per-node=1", script, tmp_path, 6, 0)
    code, output = without_ipv4(tmp_path, "sh", "-c", BOTH, "sh", *words, GLOO_SOCKET_IFNAME="lo")
    logs = "\n".join((tmp_path / f"agent{k}.log").read_text(errors="replace") for k in range(2))
    assert code == 0, output + logs
    assert trained(tmp_path)


@pytest.mark.parametrize("address", ["", "::1"])
def test_the_host_of_a_rendezvous_store_serves_an_ipv6_address(tmp_path: Path, address: str) -> None:
    program = """
import signal, subprocess, sys
from torch._C._distributed_c10d import TCPStore
host = subprocess.Popen([sys.executable, "-m", "flashckpt.daemon.store_host", "0", *sys.argv[1:]], stderr=subprocess.PIPE, text=True)
try:
    port = next(int(line.split()[-1]) for line in host.stderr if "on port" in line)
    TCPStore("::1", port, is_master=False, wait_for_workers=False).set("a", "b")
    host.send_signal(signal.SIGTERM)
    sys.exit(host.wait(60))
finally:
    host.kill()
"""
    code, output = without_ipv4(tmp_path, sys.executable, "-c", program, *(["--address", address] if address else []))
    assert code == 0, output
