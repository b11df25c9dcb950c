"""The program that a spawned Python worker runs before the user's script: `python -u -m flashckpt.daemon.launcher.spawn_main [OPTIONS] SCRIPT ...`.

A worker that is not forked is a new interpreter and needs no clean-up of inherited state. It, too, dumps the stacks
of its threads when the ranks hang, and reports its traceback when it fails, without @record.
"""

from __future__ import annotations

import faulthandler
import sys

from flashckpt.daemon.zygote import worker
from flashckpt.environment import env

MODULE, OWN_LOG = "--as-module", "--own-log"


def command(argv: list[str], *, module: bool, own_log: bool) -> list[str]:
    """Return the command line for `argv` (script or module, then its arguments).

    Args:
        argv: The arguments of `python` or, with `module`, of `python -m`.
        module: Run it as `python -m` does.
        own_log: Its standard error goes to its own file, to which every rank prints its traceback.
    """
    options = [*([MODULE] if module else []), *([OWN_LOG] if own_log else [])]
    return [sys.executable, "-u", "-m", "flashckpt.daemon.launcher.spawn_main", *options, "--", *argv]


def main() -> int:
    """Run the script; returns the exit code to end with."""
    end = sys.argv.index("--")
    options, argv = sys.argv[1:end], sys.argv[end + 1 :]
    worker.rebuild_stream(1, "stdout")
    worker.rebuild_stream(2, "stderr")
    faulthandler.enable(all_threads=True)
    worker.register_stacks(env.FLASHCKPT_STACKS_FILE)
    request = {"argv": argv, "module": MODULE in options, "stderr": OWN_LOG in options}
    return worker.run_recorded({**request, "error_file": env.TORCHELASTIC_ERROR_FILE})


if __name__ == "__main__":
    sys.exit(main())
