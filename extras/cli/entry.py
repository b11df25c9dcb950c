"""The first line of the `flashckpt` command: Ctrl-C while the rest is being imported ends it quietly, too."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code; 130 where it was interrupted before it began."""
    try:
        from flashckpt.cli.main import main as command
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: nothing was done\n")
        sys.exit(130)
    command()
