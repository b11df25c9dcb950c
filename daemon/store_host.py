"""`python -m flashckpt.daemon.store_host PORT`: host the rendezvous store on a machine that does not train.

The c10d rendezvous is kept in one TCP store. In the agent of a training node it dies with that node; here it
does not. The agents get `--rdzv-endpoint THIS_HOST:PORT --rdzv-conf is_host=0`. PORT 0 takes a free one and prints it.
"""

from __future__ import annotations

import logging
import signal
import sys
import time

import click

_log = logging.getLogger("flashckpt.dlrun")


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("port", type=int)
@click.option("--address", default="", help="Listen on this address of the machine alone; default: on all.")
def main(port: int, address: str) -> None:
    """Serve until SIGTERM or SIGINT; exit with 1 if the port is taken."""
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
        sys.exit(1)
    _log.info("rendezvous store%s on port %d", f" at {address}" if address else "", server.port)
    signal.sigwait(wanted)
    _log.info("ended after %.0f s", time.monotonic() - begun)


if __name__ == "__main__":
    main()
