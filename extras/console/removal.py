"""`flashckpt rm`: one checkpoint less, by the deletion of retention; never the kept, the last good, nor one that is in use."""

from __future__ import annotations

import click
from rich.table import Table

from flashckpt.checkpoint.catalog import CheckpointInfo, look_at, read_contents
from flashckpt.checkpoint.retention import delete, kept_prefixes, leased_prefixes
from flashckpt.checkpoint.root_records import read_generations
from flashckpt.cli.common import (
    Command,
    age_of,
    complete_step,
    human_bytes,
    identity_of,
    jobs_on_this_machine,
    json_option,
    new_table,
    open_root,
    root_options,
    show,
)
from flashckpt.core.lineage import is_rolled_back
from flashckpt.errors import ConfigError, JobInUseError, NoCheckpointError
from flashckpt.storage.store import Store


@click.command("rm", cls=Command)
@root_options
@click.argument("step", metavar="STEP[.gN]", shell_complete=complete_step)
@click.option("--apply", "do_it", is_flag=True, help="Remove; without it only show what would be removed.")
@json_option
def rm(*, root: str, options: tuple[str, ...], step: str, do_it: bool, as_json: bool) -> None:
    """Remove the checkpoint of STEP. Damaged ones too.

    Refused: one with a keep mark, the newest one that is intact and free of NaN, one that is being read, and the one that
    a job on this machine would continue from. Whoever is killed leaves no half of it visible; gc removes the rest.

    Example:
      flashckpt rm /checkpoints/run7 1200 --apply
    """
    store = open_root(root, options)
    contents = read_contents(store)
    info = _chosen(store, contents.infos, step)
    _refuse(store, contents.infos, info)
    done = delete(store, contents.names, [info.prefix], dry_run=not do_it)
    if do_it and not done.checkpoints:
        raise JobInUseError(
            f"{info.prefix} was not removed",
            found="it was marked or is being read since a moment ago",
            state="A mark keeps it; what is being read is no longer listed, and its data goes with the next gc --apply.",
            remedy=f"flashckpt ls {store.url}",
        )
    document = {
        "root": store.url, "prefix": info.prefix, "step": info.step, "generation": info.generation,
        "nbytes": done.nbytes, "applied": do_it,
    }  # fmt: skip
    show(document, as_json=as_json, table=lambda: _table(info, done.nbytes, do_it=do_it))


def _chosen(store: Store, infos: tuple[CheckpointInfo, ...], step: str) -> CheckpointInfo:
    number, generation = identity_of(step)
    found = [one for one in infos if one.step == number and generation in (None, one.generation)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{one.step}.g{one.generation}" for one in found or infos[:8])
    if found:
        raise ConfigError(f"there are several checkpoints of step {number}", found=names, remedy="name one of them")
    raise NoCheckpointError(f"{store.url} has no checkpoint {step}", found=names, remedy="choose one of these")


def _refuse(store: Store, infos: tuple[CheckpointInfo, ...], info: CheckpointInfo) -> None:
    """Raise where the checkpoint has to stay."""
    nothing = "Nothing was removed."
    if info.prefix in kept_prefixes(store):
        raise ConfigError(
            f"{info.prefix} is marked to be kept", state=nothing,
            remedy=f"flashckpt keep {store.url} {info.step}.g{info.generation} --remove, then again",
        )  # fmt: skip
    if info.prefix in leased_prefixes(store):
        raise JobInUseError(f"{info.prefix} is being read", state=nothing, remedy="try again in ten minutes")
    for directory in jobs_on_this_machine(store.url):
        status = directory.read_status()
        if directory.daemon_alive() and status is not None and status.committed == info.identity:
            raise JobInUseError(
                f"job {directory.job} on this machine would continue from {info.prefix} if its memory were lost",
                state=nothing, remedy=f"flashckpt persist {directory.job}, then again",
            )  # fmt: skip
    if info.prefix == _last_good(store, infos):
        raise ConfigError(
            f"{info.prefix} is the newest checkpoint that is intact", state=nothing,
            expected="another one to continue from", remedy="delete the whole root where it is not needed any more",
        )  # fmt: skip


def _last_good(store: Store, infos: tuple[CheckpointInfo, ...]) -> str:
    """Return the newest one that is whole, not rolled back and, if there is such a one, free of NaN; "" for none."""
    generations = read_generations(store)
    usable = [one for one in infos if not one.problem and not is_rolled_back(one.identity, generations)]
    for one in sorted(usable, key=lambda one: (not one.suspects, one.identity), reverse=True):
        if (found := look_at(store, one.prefix, whole=True)) is not None and not found.problem:
            return one.prefix
    return ""


def _table(info: CheckpointInfo, nbytes: int, *, do_it: bool) -> Table:
    table = new_table("CHECKPOINT", ">AGE", ">SIZE", "")
    word = "removed" if do_it else "would be removed (--apply removes it)"
    table.add_row(info.prefix, age_of(info.created_s), human_bytes(nbytes), word)
    return table
