"""What the commands share: opening roots, choosing a checkpoint and its numbers, printing for people or programs."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from click.shell_completion import CompletionItem

from flashckpt.checkpoint.catalog import CheckpointInfo, list_checkpoints
from flashckpt.checkpoint.choice import choose_checkpoint
from flashckpt.checkpoint.marks import NAME, names_of
from flashckpt.checkpoint.root_records import read_generations
from flashckpt.cli.output import FittingTable, OutputConsole
from flashckpt.core.lineage import is_rolled_back
from flashckpt.core.manifest import Manifest
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import ConfigError, FlashckptError, NoCheckpointError
from flashckpt.printable import printable, to_json
from flashckpt.shm.job_directory import JobDirectory, jobs_in_memory
from flashckpt.shm.private import Skipped
from flashckpt.storage.factory import is_process_local, open_store, root_url
from flashckpt.storage.store import Store

Function = TypeVar("Function", bound=Callable[..., Any])
_NUMBER = re.compile("[0-9]{1,20}")
JUMP = 10.0
"""By which factor the norm of a tensor must grow or shrink to be shown."""


class Command(click.Command):
    """A command whose examples keep their lines in the help text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("help"):  # a line with a backspace character alone tells click not to wrap the paragraph
            kwargs["help"] = re.sub(r"\n\n(?=Examples?:|STATE )", "\n\n\b\n", inspect.cleandoc(kwargs["help"]))
        super().__init__(*args, **kwargs)


def complete_step(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Complete a step by those of ROOT, newest first; nothing where it cannot be read."""
    del parameter
    # behind `--step` click has not come to the arguments yet
    root, options = context.params.get("root") or next(iter(context.args), ""), context.params.get("options") or ()
    try:
        store = open_root(str(root), options)
        infos, named = list_checkpoints(store), names_of(store)
    except (FlashckptError, OSError):
        return []
    steps = [info.step for info in infos]
    numbers = [f"{i.step}.g{i.generation}" if steps.count(i.step) > 1 else str(i.step) for i in infos]
    return [one for one in [*numbers, *named] if one.startswith(begun)]


def complete_job(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Complete the id of a job by those in this machine's memory."""
    del context, parameter
    return [one.job for one in jobs_in_memory()[0] if one.job.startswith(begun)]


def complete_source(context: click.Context, parameter: click.Parameter, begun: str) -> list[str] | list[CompletionItem]:
    """Complete the id of a job, or where none begins so, have the shell complete a path."""
    return complete_job(context, parameter, begun) or [CompletionItem(begun, type="file")]


def json_option(function: Function) -> Function:
    """Add --json."""
    option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document for programs.")
    return option(function)


def json_file_option(function: Function) -> Function:
    """Add --json[=PATH]: alone it prints the document as every command's --json does, with PATH it goes there."""
    return click.option(
        "--json",
        "json_path",
        metavar="[PATH]",
        type=click.Path(path_type=Path, allow_dash=True),
        is_flag=False,
        flag_value="-",
        help="Print one JSON document for programs, or write it to PATH.",
    )(function)


def root_options(function: Function) -> Function:
    """Add ROOT and -o KEY=VALUE."""
    storage = click.option(
        "-o", "options", metavar="KEY=VALUE", multiple=True, help="Storage option, e.g. -o endpoint_url=http://..."
    )
    return click.argument("root", type=click.Path())(storage(function))


def step_option(function: Function) -> Function:
    """Add --step."""
    return click.option(
        "--step",
        "step",
        metavar="STEP[.gN]",
        help="Checkpoint, e.g. 120 or 120.g3  [default: the newest valid one]",
        shell_complete=complete_step,
    )(function)


def parse_options(options: tuple[str, ...]) -> dict[str, Any]:
    """Return KEY=VALUE pairs as a dict; of a value that is true, false or an object of JSON that, of any other its text.

    Raises:
        ConfigError: One has no "=", or an object that is not JSON.
    """
    pairs = [option.partition("=") for option in options]
    if bad := [key for key, equals, _ in pairs if not equals]:
        raise ConfigError("a storage option has no value", found=bad[0], expected="KEY=VALUE")
    return {key: _value_of(key, text) for key, _, text in pairs}


def _value_of(key: str, text: str) -> Any:
    if not text.startswith("{") and text not in ("true", "false"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the storage option {key} cannot be read", found=str(error), expected="JSON") from error


def open_root(root: str, options: tuple[str, ...] = ()) -> Store:
    """Return the store of an existing root.

    Raises:
        RootError: It does not exist or cannot be read.
        ConfigError: The URL or an option cannot be used.
    """
    if is_process_local(root):
        raise ConfigError(f"{root} is process-local and cannot be read from here")
    store = open_store(root, **parse_options(options))
    store.check(write=False)
    return store


def choose(store: Store, step: str | None) -> CheckpointInfo:
    """Return the checkpoint `step` ("120", "120.g3" or a name) names, or the newest valid one; errors as `choose_checkpoint`."""
    if step is not None and NAME.fullmatch(step) and (mark := names_of(store).get(step)) is not None:
        step = mark.prefix
    return choose_checkpoint(store, *((None, None) if step is None else identity_of(step)))


def identity_of(step: str) -> tuple[int, int | None]:
    """Return step and generation, None where it is not named, of "120" or "120.g3"."""
    number, _, generation = step.removeprefix("step-").partition(".g")
    if not _NUMBER.fullmatch(number) or (generation and not _NUMBER.fullmatch(generation)):
        raise ConfigError(
            "a step cannot be read",
            found=step,
            expected="STEP or STEP.gN, e.g. 120 or 120.g3, or a name that `flashckpt keep` gave",
        )
    return int(number), int(generation) if generation else None


def passed_over(store: Store, chosen: CheckpointInfo) -> list[str]:
    """Return what is wrong with each checkpoint that is newer than the chosen one and cannot be used."""
    infos = list_checkpoints(store, damaged=True, whole=True)
    return [f"{i.prefix}: {i.problem}" for i in infos if i.problem and i.identity > chosen.identity]


def abandoned(store: Store, infos: list[CheckpointInfo]) -> set[SnapshotId]:
    """Return the ids that a later generation rolled back."""
    generations = read_generations(store)
    return {info.identity for info in infos if is_rolled_back(info.identity, generations)}


def jobs_on_this_machine(root: str | None = None) -> list[JobDirectory]:
    """Return the job directories of this user, only those with the given root if one is given.

    Foreign files among them are ignored; `tell_skipped` reports them on standard error.
    """
    found, skipped = jobs_in_memory()
    tell_skipped(skipped)
    return [directory for directory in found if root is None or _root_of(directory) == root_url(root)]


def job_named(name: str) -> JobDirectory:
    """Return the job of this machine's memory with this id or root; NoCheckpointError where there is none."""
    found = jobs_on_this_machine()
    for one in [one for one in found if one.job == name] + [one for one in found if _root_of(one) == root_url(name)]:
        return one
    raise NoCheckpointError(
        f"no job {name} is in this machine's memory",
        found=", ".join(one.job for one in found[:5]),
        remedy="flashckpt status names those that are; ask on a node of the job",
    )


def tell_skipped(skipped: Sequence[Skipped]) -> list[dict[str, str]]:
    """Report on standard error the foreign files in this user's memory folder; return them for JSON."""
    for one in skipped:
        click.echo(f"left alone, as it is not this user's own: {printable(one.path)} ({one.reason})", err=True)
    return [{"path": str(one.path), "reason": one.reason} for one in skipped]


def _root_of(directory: JobDirectory) -> str | None:
    try:
        config = directory.read_config()
    except (FlashckptError, OSError):
        return None
    return None if config is None else root_url(config.root)


def show(value: object, *, as_json: bool, table: Callable[[], object]) -> None:
    """Print `value` as JSON, or what `table()` returns with rich."""
    if as_json:
        click.echo(to_json(value))
        return
    console().print(table())


def console() -> OutputConsole:
    """Return a console on the current standard output; wide where it is not a terminal, so that lines stay whole."""
    return OutputConsole()


def new_table(*columns: str, title: str = "") -> FittingTable:
    """Return a table; a column whose name starts with ">" holds numbers: right-aligned, never cut."""
    return FittingTable(*columns, title=title)


def human_bytes(nbytes: float) -> str:
    """Return bytes as "1.5 GB" (decimal units)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def human_age(seconds: float) -> str:
    """Return seconds as "3 min"."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def age_of(unix_s: float) -> str:
    """Return how long ago a unix time is."""
    return human_age(time.time() - unix_s)


def numbers_of(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return by tensor its largest magnitude (None: not finite), its norm, and whether it became non-finite.

    Integers, and tensors of a checkpoint of an earlier release, are left out.
    """
    figures, table = manifest.figures, manifest.table
    if figures is None:
        return {}
    found = {}
    for fqn in table.fqns:
        rows = np.asarray(table.rows(fqn), np.int64)
        rows = rows[figures.largest[rows] >= 0]
        if not len(rows):
            continue
        largest = float(figures.largest[rows].max())
        norm = float(np.sqrt(np.square(figures.norm[rows].astype(np.float64)).sum()))
        finite = bool(np.isfinite(largest))
        found[fqn] = {
            "largest": largest if finite else None,
            "norm": norm if finite and np.isfinite(norm) else None,
            "suspect": bool(figures.suspect[rows].any()),
        }
    return found


def words_of(numbers: dict[str, Any] | None) -> str:
    """Return the figures of one tensor as people read them; "" for none."""
    if numbers is None:
        return ""
    if numbers["suspect"]:
        return "NOT FINITE, and was before"
    if numbers["largest"] is None:
        return "not finite, as in the first snapshot"
    norm = "" if numbers["norm"] is None else f", norm {numbers['norm']:.3g}"
    return f"up to {numbers['largest']:.3g}{norm}"


def jumps(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tensors that became non-finite, or whose norm is JUMP times that of before, or a JUMPth."""
    found = []
    for fqn in sorted(before.keys() & after.keys()):
        old, new = before[fqn]["norm"], after[fqn]["norm"]
        became_bad = after[fqn]["suspect"] or (before[fqn]["largest"] is not None and after[fqn]["largest"] is None)
        if became_bad or (old and new and not 1 / JUMP < new / old < JUMP):
            found.append({"fqn": fqn, "norm": [old, new], "suspect": after[fqn]["suspect"]})
    return found
