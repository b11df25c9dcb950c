"""What a copy of the zygote does before it forks workers: call the function of `--warm`, so that they inherit what it did."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError

NO_REHEARSAL = "none"


def check_target(target: str) -> str:
    """Return what --warm names, as it is.

    Raises:
        ConfigError: It is no module:function.
    """
    module, colon, name = target.partition(":")
    if target not in ("", NO_REHEARSAL) and not (
        colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))
    ):
        raise ConfigError(
            "--warm names no function",
            found=target,
            expected=f"MODULE:FUNCTION, e.g. mytrainer.warm:rehearse, or {NO_REHEARSAL}",
            state="Nothing was started.",
        )
    return target


def rehearse(request: dict[str, Any]) -> str:
    """Call the function with the words of the job's command line, in the environment of this node's first worker.

    Args:
        request: `target` (module:function), `argv` and `module` as for a worker, and its `env`.

    Returns:
        Why no worker may inherit this process, or "".
    """
    target, argv = request["target"], list(request["argv"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = argv
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if request["module"] else Path(argv[0]).resolve().parent)
    module, _, name = target.partition(":")
    try:
        reason = getattr(importlib.import_module(module), name)(argv[1:])
    except BaseException as error:  # noqa: BLE001 -- this process is given up; the job does not notice
        return f"{target} failed: {type(error).__name__}: {error}"
    return str(reason or "")
