"""`python -m flashckpt.daemon.store_host PORT`: host the rendezvous store on a machine that does not train.

The c10d rendezvous is kept in one TCP store. In the agent of a training node it dies with that node; here it
does not. The agents get `--rdzv-endpoint THIS_HOST:PORT --rdzv-conf is_host=0`.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time

_log = logging.getLogger("flashckpt.dlrun")


def main(args: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns 0, or 1 if the port is taken."""
    parser = argparse.ArgumentParser(prog="flashckpt.daemon.store_host", description=__doc__)
    parser.add_argument("port", type=int, help="TCP port; 0 takes a free one and prints it")
    parser.add_argument("--address", default="", help="listen on this address of the machine alone; default: on all")
    given = parser.parse_args(args)
    address, port = str(given.address), int(given.port)
    logging.basicConfig(format="[store] %(message)s", level=logging.INFO, stream=sys.stderr)
    from torch._C._distributed_c10d import TCPStore

    from flashckpt.daemon.launcher.rendezvous_store import loopback, tcp_store

    begun = time.monotonic()
    wanted = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)  # before the server's threads are made: they inherit it
    try:
        # without an address it listens on all of them; the loopback one is where this process itself connects
        make = tcp_store if address else TCPStore
        server = make(address or loopback(), port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        _log.error("port %d cannot be served: %s", port, str(error).splitlines()[0])
        return 1
    _log.info("rendezvous store%s on port %d", f" at {address}" if address else "", server.port)
    signal.sigwait(wanted)
    _log.info("ended after %.0f s", time.monotonic() - begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
