"""What a spawned Python worker runs before the user's script: `python -u -m flashckpt.daemon.launcher.spawn_main [OPTIONS] SCRIPT ...`.

A worker that is not forked is a fresh interpreter and needs none of what makes a forked one fresh. But it, too,
gives the stacks of its threads when the ranks hang, and its traceback when it fails, without @record.
"""

from __future__ import annotations

import faulthandler
import os
import sys

from flashckpt.daemon.launcher import worker

MODULE, OWN_LOG = "--as-module", "--own-log"


def command(argv: list[str], *, module: bool, own_log: bool) -> list[str]:
    """Return the command line for `argv` (script or module, then its arguments).

    Args:
        argv: What `python ARGV` or, with `module`, `python -m ARGV` would get.
        module: Run it as `python -m` does.
        own_log: Its standard error is a file of its own: every rank prints its traceback there.
    """
    options = [*([MODULE] if module else []), *([OWN_LOG] if own_log else [])]
    return [sys.executable, "-u", "-m", "flashckpt.daemon.launcher.spawn_main", *options, "--", *argv]


def main() -> int:
    """Run the script; returns the exit code to end with."""
    end = sys.argv.index("--")
    options, argv = sys.argv[1:end], sys.argv[end + 1 :]
    faulthandler.enable(all_threads=True)
    worker.register_stacks(os.environ.get("FLASHCKPT_STACKS_FILE", ""))
    request = {"argv": argv, "module": MODULE in options, "stderr": OWN_LOG in options}
    return worker.run_recorded({**request, "error_file": os.environ.get("TORCHELASTIC_ERROR_FILE", "")})


if __name__ == "__main__":
    sys.exit(main())
