"""`python -m flashckpt.daemon.store_host PORT`: host the rendezvous store on a machine that does not train."""

from __future__ import annotations

from flashckpt.daemon.launcher.store_host import main

if __name__ == "__main__":
    main()
