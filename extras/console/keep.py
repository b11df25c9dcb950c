"""`flashckpt keep`: marks that retention respects, and names for them."""

from __future__ import annotations

import math

import click

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.marks import best_of, keep_as, names_of
from flashckpt.checkpoint.retention import keep as mark
from flashckpt.checkpoint.retention import unkeep
from flashckpt.cli.common import Command, abandoned, choose, complete_step, json_option, open_root, root_options, show
from flashckpt.errors import ConfigError, NoCheckpointError
from flashckpt.storage.store import Store

BEST = "best"


@click.command(cls=Command)
@root_options
@click.argument("step", metavar="[STEP[.gN]]", required=False, shell_complete=complete_step)
@click.option("--remove", is_flag=True, help="Take the mark away again.")
@click.option("--name", metavar="NAME", help="Keep it under a name, which --step takes; whoever had it is let go.")
@click.option("--best", "metric", metavar="METRIC", help="Keep the one with the lowest METRIC that was logged.")
@click.option("--highest", is_flag=True, help="With --best: the highest.")
@json_option
def keep(
    *,
    root: str,
    options: tuple[str, ...],
    step: str | None,
    remove: bool,
    name: str | None,
    metric: str | None,
    highest: bool,
    as_json: bool,
) -> None:
    """Keep the checkpoint of STEP whatever the retention policy says.

    With --best the one whose last value of `ckpt.log(METRIC, ...)` up to its step is the lowest, under the name `best` if no
    other is given. It is compared with the one that has the name, so that old curves are not needed.

    Examples:
      flashckpt keep /checkpoints/run7 1200 --name before-cooldown
      FLASHCKPT_AFTER_COMMIT="keep --best val_loss --every 100" dlrun ...
    """
    store = open_root(root, options)
    if (step is None) == (metric is None) or (remove and (name or metric)):
        raise ConfigError("give either STEP or --best", found="both" if step else "neither, or --remove with a name")
    value = math.nan
    if metric is not None:
        prefix, value = best(store, metric, name or BEST, highest=highest)
    else:
        prefix = choose(store, step).prefix
    if remove:
        unkeep(store, prefix)
    elif name or metric:
        keep_as(store, prefix, name or BEST, value)
    else:
        mark(store, prefix)
    called = f" as {name or BEST}" if name or metric else ""
    of = f": {metric} {value:g}" if metric else ""
    text = f"{prefix} is {'no longer kept' if remove else 'kept'}{called}{of}"
    document = {"prefix": prefix, "kept": not remove, "name": name or (BEST if metric else "")}
    show(document | ({"value": value} if metric else {}), as_json=as_json, table=lambda: text)


def best(store: Store, metric: str, name: str, *, highest: bool) -> tuple[str, float]:
    """Return the best checkpoint and its value: of those whose value is known, and the one that has the name.

    Raises:
        NoCheckpointError: No value is known.
    """
    infos = list_checkpoints(store)
    left = abandoned(store, infos)
    live = [info for info in infos if info.identity not in left and not info.suspects]
    found, held = best_of(store, live, metric, highest=highest), names_of(store).get(name)
    is_there = held is not None and held.prefix in {info.prefix for info in live} and not math.isnan(held.value)
    if (
        held is not None
        and is_there
        and (found is None or held.value == found.value or (held.value > found.value) == highest)
    ):
        return held.prefix, held.value
    if found is None:
        raise NoCheckpointError(
            f"no checkpoint of {store.url} has a value of {metric}",
            expected=f'ckpt.log("{metric}", value) before its step, on rank 0',
            remedy="flashckpt dashboard shows what was logged",
        )
    return found.prefix, found.value
