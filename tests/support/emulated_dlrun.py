"""dlrun on a machine whose accelerator is the emulated one: `python emulated_dlrun.py [DLRUN'S ARGUMENTS]`.

EMULATED_CONTEXT_MS: how long the context of a process takes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # this folder has modules with the names of others
    from support import emulated_device

    emulated_device.install().context_ms(int(os.environ.get("EMULATED_CONTEXT_MS", "0")))
    from flashckpt.daemon.launcher import cli

    sys.exit(cli.main())
