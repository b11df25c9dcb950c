"""`python -m flashckpt.daemon.stand_in PROGRAM ARGS`: PROGRAM, with dlrun wherever it calls torch's launcher as an API.

PROGRAM is a script, `-m MODULE`, or a command on PATH that is a Python script. What it starts as
`python -m torch.distributed.run` in another process stays torch's.
"""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import launcher
from torch.distributed import run as torchrun
from torch.distributed.launcher import api as launcher_api

from flashckpt.daemon.launcher import cli, launch
from flashckpt.daemon.launcher.options import CommandError
from flashckpt.errors import FlashckptError

_USAGE = "usage: python -m flashckpt.daemon.stand_in PROGRAM|-m MODULE [ARGS]\n"


def stand_in() -> None:
    """Lead torch's own names to dlrun's in this process, for programs that import them from torch.

    The parser stays torch's, with its default of no restart.
    """
    vars(torchrun).update(run=cli.run, main=cli.main)
    for module in (torchrun, launcher, launcher_api):
        vars(module)["elastic_launch"] = launch.elastic_launch


def main(words: Sequence[str]) -> int:
    """Run the program as `python` would; return dlrun's exit code where its launch fails."""
    if not words or words[0] in {"-h", "--help"} or list(words) == ["-m"]:
        sys.stderr.write(_USAGE)
        return 0 if words and words[0] != "-m" else 2
    cli.set_up_log()
    stand_in()
    try:
        _run(list(words))
    except FlashckptError as error:
        return cli.fail(error)
    return 0


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = ""
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    found = words[0] if Path(words[0]).is_file() else shutil.which(words[0])
    if found is None:
        raise CommandError.missing("program", words[0])
    sys.argv = [found, *words[1:]]
    sys.path[0] = str(Path(found).resolve().parent)
    runpy.run_path(found, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
