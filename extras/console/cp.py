"""`flashckpt cp`: one checkpoint on another root."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from flashckpt.checkpoint.marks import NAME, names_of
from flashckpt.cli.common import (
    Command,
    choose,
    complete_step,
    human_bytes,
    json_option,
    new_table,
    open_root,
    parse_options,
    show,
)
from flashckpt.commands.progress import progress
from flashckpt.console.copying import copy_checkpoint
from flashckpt.dcp.direct_writer import refuse_running_job
from flashckpt.errors import ConfigError, RootError
from flashckpt.storage.factory import is_process_local, open_store, root_url

_NUMBER = re.compile(r"(step-)?[0-9]+(\.g[0-9]+)?")


@click.command(cls=Command)
@click.argument("root", metavar="ROOT[@STEP|@NAME]", type=click.Path())
@click.argument("target", metavar="ROOT2", type=click.Path())
@click.option("--step", metavar="STEP[.gN]", help="Checkpoint, as @STEP or @NAME.", shell_complete=complete_step)
@click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="Storage option of ROOT.")
@click.option("-t", "target_options", metavar="KEY=VALUE", multiple=True, help="Storage option of ROOT2.")
@json_option
def cp(
    *,
    root: str,
    target: str,
    step: str | None,
    options: tuple[str, ...],
    target_options: tuple[str, ...],
    as_json: bool,
) -> None:
    """Copy a checkpoint of ROOT, by default the newest valid one, to ROOT2, also beside a running job.

    It keeps its step and generation, and a job that is given ROOT2 continues from it. ROOT2 may be new, or hold other
    checkpoints of the same run. Every byte is verified on the way; nothing is visible before all of it is there.
    Called again after it was killed, it continues.

    Examples:
      flashckpt cp /checkpoints/run7@1200 s3://archive/run7
      flashckpt cp s3://bucket/run7 /backup/run7 -o endpoint_url=http://...
    """
    if step is None:
        root, step = _apart(root, options)
    if root_url(root) == root_url(target):
        raise ConfigError(
            "a checkpoint cannot be copied to its own root", found=root, remedy="name another root to copy to"
        )
    if is_process_local(target):
        raise ConfigError(f"{target} is process-local: no other process could read the checkpoint")
    source = open_root(root, options)
    info = choose(source, step)
    other = open_store(target, **parse_options(target_options))
    other.check(write=True)
    refuse_running_job(other.url)
    with progress("copying", info.nbytes, quiet=as_json) as advance:
        done = copy_checkpoint(source, info.prefix, other, advance)
    document = {
        "from": source.url, "root": other.url, "prefix": info.prefix, "step": info.step,
        "generation": info.generation, "nbytes": done.nbytes, "kept_nbytes": done.kept_bytes, "was_there": done.was_there,
    }  # fmt: skip
    show(document, as_json=as_json, table=lambda: _table(document))


def _apart(text: str, options: tuple[str, ...]) -> tuple[str, str | None]:
    """Return ROOT and STEP of ROOT@STEP; the whole and None where "@" is part of the root's own name."""
    root, _, step = text.rpartition("@")
    if root and not Path(text).exists():
        is_name = NAME.fullmatch(step) is not None and not is_process_local(root)
        if _NUMBER.fullmatch(step) or (is_name and (Path(root).is_dir() or step in _names(root, options))):
            return root, step
    return text, None


def _names(root: str, options: tuple[str, ...]) -> Collection[str]:
    try:
        return names_of(open_root(root, options))
    except RootError:
        return ()


def _table(document: dict[str, Any]) -> Table:
    table = new_table("CHECKPOINT", ">SIZE", "", "ROOT")
    kept = f", {human_bytes(document['kept_nbytes'])} of it earlier" if document["kept_nbytes"] else ""
    word = "was there already" if document["was_there"] else f"copied{kept}"
    table.add_row(document["prefix"], human_bytes(document["nbytes"]), word, document["root"])
    return table
