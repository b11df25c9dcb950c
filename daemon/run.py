"""`python -m flashckpt.daemon.run`: the command `dlrun`, for environments where it is not on PATH."""

from __future__ import annotations

import sys
from typing import Any

from flashckpt.daemon.launcher import cli
from flashckpt.daemon.launcher.cli import main


def __getattr__(name: str) -> Any:
    """Re-export what dlrun offers: torchrun's names, for code that imports them from its launcher."""
    return getattr(cli, name)


if __name__ == "__main__":
    sys.exit(main())
