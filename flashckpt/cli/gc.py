"""`flashckpt gc`: removal of what nobody needs any more, in memory and on storage. Shows before it removes."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Group

from flashckpt.checkpoint.retention import Policy, prune, sweep
from flashckpt.cli.common import (
    Command,
    human_age,
    human_bytes,
    json_option,
    new_table,
    open_root,
    parse_options,
    show,
)
from flashckpt.memory.gc import dead_memory, remove


@click.command(cls=Command)
@click.argument("root", required=False, type=click.Path())
@click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="Storage option of ROOT.")
@click.option("--apply", "do_it", is_flag=True, help="Remove; without it only show what would be removed.")
@click.option("--job", metavar="NAME", help="Remove the memory of this dead job, however young it is.")
@click.option(
    "--keep-last", type=click.IntRange(min=1), metavar="N", help="With ROOT: prune to this many newest checkpoints."
)
@click.option(
    "--keep-every", type=click.IntRange(min=1), metavar="N", help="With ROOT: also keep steps divisible by this."
)
@json_option
def gc(
    *,
    root: str | None,
    options: tuple[str, ...],
    do_it: bool,
    job: str | None,
    keep_last: int | None,
    keep_every: int | None,
    as_json: bool,
) -> None:
    """Show, and with --apply remove, what nobody needs any more.

    Without ROOT: memory of jobs that are dead for longer than FLASHCKPT_KEEP_DEAD (24 h), or of --job.
    With ROOT: unfinished checkpoints, temporary objects, expired leases; with --keep-last also old checkpoints.

    Examples:
      flashckpt gc
      flashckpt gc --job run7 --apply
      flashckpt gc /checkpoints/run7 --keep-last 3 --apply
    """
    parse_options(options)
    memory = collect_memory(job, do_it=do_it) if root is None or job is not None else []
    storage: dict[str, Any] = {}
    if root is not None:
        store = open_root(root, options)
        swept = sweep(store, dry_run=not do_it)
        pruned = None
        if keep_last is not None:
            pruned = prune(store, Policy(keep_last=keep_last, keep_every=keep_every), dry_run=not do_it)
        storage = {
            "orphans": swept.orphans,
            "temporary": swept.temporary,
            "checkpoints": pruned.checkpoints if pruned else (),
            "nbytes": swept.nbytes + (pruned.nbytes if pruned else 0),
        }
    document = {"applied": do_it, "memory": memory, "storage": storage}
    show(document, as_json=as_json, table=lambda: _page(document))


def collect_memory(job: str | None, *, do_it: bool) -> list[dict[str, Any]]:
    """Return the dead jobs whose memory may go, removing it if asked.

    Args:
        job: Only this job, whatever its age; None: every job that is dead for FLASHCKPT_KEEP_DEAD seconds.
        do_it: Remove.

    Raises:
        NoCheckpointError: `job` is not here.
        JobInUseError: `job` is alive.
    """
    found = []
    for dead in dead_memory(job):
        if job is None and not dead.is_expired:
            continue
        found.append({"job": dead.job, "path": str(dead.path), "age_s": dead.age_s, "nbytes": dead.nbytes})
        if do_it:
            remove(dead)
    return found


def _page(document: dict[str, Any]) -> Group:
    word = "removed" if document["applied"] else "would be removed (--apply removes it)"
    table = new_table("WHAT", "NAME", ">SIZE", ">DEAD FOR")
    for one in document["memory"]:
        table.add_row("memory", one["job"], human_bytes(one["nbytes"]), human_age(one["age_s"]))
    storage = document["storage"]
    for key in ("orphans", "temporary", "checkpoints"):
        for name in storage.get(key, ()):
            table.add_row({"orphans": "unfinished"}.get(key, key.removesuffix("s")), name, "", "")
    if not table.row_count:
        return Group("nothing to remove")
    nbytes = storage.get("nbytes", 0) + sum(one["nbytes"] for one in document["memory"])
    return Group(table, f"{human_bytes(nbytes)} {word}")
