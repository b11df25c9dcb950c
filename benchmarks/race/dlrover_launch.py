"""dlrover-run 0.6.1 for torch 2.13, which its local master cannot be started with: torch has an argument more since. Nothing else."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main() -> None:
    """Fill the missing argument in, then be dlrover-run."""
    handlers: Any = importlib.import_module(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    )
    begin = handlers.SubprocessHandler.__init__

    def filled(self: Any, *words: Any, numa_options: Any = None, **more: Any) -> None:
        if len(words) > 6:
            begin(self, *words, **more)
        else:
            begin(self, *words, numa_options=numa_options, **more)

    handlers.SubprocessHandler.__init__ = filled
    sys.argv[0] = "dlrover-run"
    importlib.import_module("dlrover.trainer.torch.elastic_run").main()


if __name__ == "__main__":
    main()
