"""dlrun on a machine whose device takes time to make a context: `python slow_context.py [DLRUN'S ARGUMENTS]`.

Only standby processes and scripts that call `sys.modules["slow_context"].RUNTIME.synchronize(0)` use that device. Each
context that is made is a line of SLOW_CONTEXT_LOG: the process, and the device. SLOW_CONTEXT_S: how long it takes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


class SlowRuntime:
    """What a standby asks of torch.cuda; the context is of this process, and of what becomes of it."""

    def __init__(self) -> None:
        self.is_made = False

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 8

    def synchronize(self, index: int) -> None:
        if self.is_made:
            return
        time.sleep(float(os.environ.get("SLOW_CONTEXT_S", "0")))
        with Path(os.environ["SLOW_CONTEXT_LOG"]).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {index}\n")
        self.is_made = True


RUNTIME = SlowRuntime()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder has modules with the names of others
    from flashckpt import faults
    from flashckpt.daemon.launcher import cli
    from flashckpt.daemon.zygote import standby

    sys.modules["slow_context"] = sys.modules["__main__"]
    faults.arm(os.environ.get("FLASHCKPT_CRASH_AT"))  # this interpreter may be older than its environment
    standby._runtime = lambda: RUNTIME
    sys.exit(cli.main())
