"""`flashckpt gc`: removal of garbage in memory and on storage. Shows before it removes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich.console import Group

from flashckpt.checkpoint.retention import Policy, prune
from flashckpt.checkpoint.sweeping import sweep
from flashckpt.cli.common import (
    Command,
    complete_job,
    human_age,
    human_bytes,
    json_option,
    new_table,
    open_root,
    parse_options,
    show,
    tell_skipped,
)
from flashckpt.commands.progress import working
from flashckpt.core.settings import Settings, duration_s
from flashckpt.errors import JobInUseError, SharedMemoryError
from flashckpt.shm.gc import DeadMemory, look, remove


class _Kept(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.4 on
    """A number of checkpoints or steps, or a time."""

    name = "kept"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return it as `Checkpointer` takes it."""
        found = int(str(value)) if str(value).isascii() and str(value).isdigit() else value
        if isinstance(found, int) and found >= 1:
            return found
        if duration_s(found) is None:
            self.fail(f"{value!r} is no number from 1 and no time such as 30min, 2h or 7d", param, ctx)
        return str(found)


_KEPT = _Kept()


@click.command(cls=Command)
@click.argument("root", required=False, type=click.Path())
@click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="Storage option of ROOT.")
@click.option("--apply", "do_it", is_flag=True, help="Remove; without it only show what would be removed.")
@click.option(
    "--job",
    metavar="NAME",
    shell_complete=complete_job,
    help="Remove the memory of this dead job, however young it is.",
)
@click.option("--keep-last", type=_KEPT, metavar="N|TIME", help="With ROOT: prune to this many newest, or e.g. to 7d.")
@click.option(
    "--keep-every", type=_KEPT, metavar="N|TIME", help="With ROOT: also keep steps divisible by this, or one per 1h."
)
@json_option
def gc(
    *,
    root: str | None,
    options: tuple[str, ...],
    do_it: bool,
    job: str | None,
    keep_last: int | str | None,
    keep_every: int | str | None,
    as_json: bool,
) -> int:
    """Show, and with --apply remove, what is not needed any more.

    Without ROOT: memory of jobs that are dead for longer than FLASHCKPT_KEEP_DEAD (24 h), or of --job.
    Files of other users and links there are named and not touched. Exit code 14 if memory cannot be removed.
    With ROOT: unfinished checkpoints, temporary objects, expired leases; with --keep-last also old checkpoints.

    Examples:
      flashckpt gc
      flashckpt gc --job run7 --apply
      flashckpt gc /checkpoints/run7 --keep-last 3 --apply
    """
    parse_options(options)
    memory: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    left_alone: list[dict[str, str]] = []
    if root is None or job is not None:
        dead, skipped = look(job)
        left_alone = tell_skipped(skipped)
        memory, kept = collect_memory(dead, do_it=do_it, by_name=job is not None)
    storage: dict[str, Any] = {}
    if root is not None:
        store = open_root(root, options)
        with working("looking for what is not needed" if not do_it else "removing", quiet=as_json):
            swept = sweep(store, dry_run=not do_it)
            pruned = None
            if keep_last is not None:
                rule = Settings(keep_last=keep_last, keep_every=keep_every).for_persister()
                policy = Policy(**{name: value for name, value in rule.items() if name.startswith("keep")})
                pruned = prune(store, policy, dry_run=not do_it)
        storage = {
            "orphans": swept.orphans,
            "temporary": swept.temporary,
            "checkpoints": pruned.checkpoints if pruned else (),
            "nbytes": swept.nbytes + (pruned.nbytes if pruned else 0),
        }
    document = {"applied": do_it, "memory": memory, "kept": kept, "left_alone": left_alone, "storage": storage}
    show(document, as_json=as_json, table=lambda: _page(document))
    return SharedMemoryError.exit_code if any(one["nbytes"] for one in kept) else 0


def collect_memory(
    dead: Sequence[DeadMemory], *, do_it: bool, by_name: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the dead jobs whose memory may go or, if asked, went; and those that were to go and are still there.

    Args:
        dead: What there is.
        do_it: Remove.
        by_name: Whatever its age; else only what has been dead for FLASHCKPT_KEEP_DEAD seconds.

    Raises:
        JobInUseError: The named job was just started.
    """
    gone, kept = [], []
    for one in dead:
        if not (by_name or one.is_expired):
            continue
        row = {"job": one.job, "path": str(one.path), "age_s": one.age_s, "nbytes": one.nbytes}
        left = 0
        try:
            left = remove(one) if do_it else 0
        except FileNotFoundError:
            continue  # another gc, or its own daemon, was faster
        except JobInUseError as error:
            if by_name:
                raise
            kept.append(row | {"nbytes": 0, "problem": error.problem})
            continue
        if left:
            kept.append(row | {"nbytes": left, "problem": "not all of it could be removed"})
        if one.nbytes > left or not left:
            gone.append(row | {"nbytes": max(0, one.nbytes - left)})
    return gone, kept


def _page(document: dict[str, Any]) -> Group:
    word = "removed" if document["applied"] else "would be removed (--apply removes it)"
    table = new_table("WHAT", "NAME", ">SIZE", ">DEAD FOR", "")
    for one in document["memory"]:
        table.add_row("memory", one["job"], human_bytes(one["nbytes"]), human_age(one["age_s"]), "")
    for one in document["kept"]:
        size = human_bytes(one["nbytes"]) if one["nbytes"] else ""
        table.add_row("kept", one["job"], size, human_age(one["age_s"]), one["problem"])
    storage = document["storage"]
    for key in ("orphans", "temporary", "checkpoints"):
        for name in storage.get(key, ()):
            table.add_row({"orphans": "unfinished"}.get(key, key.removesuffix("s")), name, "", "", "")
    if not table.row_count:
        return Group("nothing to remove")
    nbytes = storage.get("nbytes", 0) + sum(one["nbytes"] for one in document["memory"])
    return Group(table, f"{human_bytes(nbytes)} {word}")
