"""`flashckpt keep`: marks that retention respects."""

from __future__ import annotations

import click

from flashckpt.checkpoint.retention import keep as mark
from flashckpt.checkpoint.retention import unkeep
from flashckpt.cli.common import Command, choose, complete_step, json_option, open_root, root_options, show


@click.command(cls=Command)
@root_options
@click.argument("step", metavar="STEP[.gN]", shell_complete=complete_step)
@click.option("--remove", is_flag=True, help="Take the mark away again.")
@json_option
def keep(root: str, options: tuple[str, ...], step: str, remove: bool, as_json: bool) -> None:
    """Keep the checkpoint of STEP whatever the retention policy says.

    Example:
      flashckpt keep /checkpoints/run7 1200
    """
    store = open_root(root, options)
    info = choose(store, step)
    if remove:
        unkeep(store, info.prefix)
    else:
        mark(store, info.prefix)
    text = f"{info.prefix} is {'no longer kept' if remove else 'kept'}"
    show({"prefix": info.prefix, "kept": not remove}, as_json=as_json, table=lambda: text)
