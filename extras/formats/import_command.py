"""`flashckpt import`: a checkpoint of another format or framework as one committed checkpoint of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from flashckpt import entry_points
from flashckpt.cli.common import Command, human_bytes, json_option, new_table, parse_options, show
from flashckpt.commands.progress import progress
from flashckpt.dcp import direct_writer
from flashckpt.errors import ConfigError
from flashckpt.interop.export_command import selection_options
from flashckpt.interop.incoming import KINDS, Foreign, detect, open_foreign
from flashckpt.interop.selection import parse_selection
from flashckpt.storage.factory import is_process_local, open_store

_FORMATS = [*KINDS, *sorted(entry_points.others(entry_points.FORMATS).keys() - {*KINDS})]


@click.command("import", cls=Command)
@click.argument("path", type=click.Path())
@click.argument("root", type=click.Path())
@click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="Storage option of ROOT.")
@click.option(
    "--step", type=click.IntRange(0), metavar="N", help="Step of the new checkpoint.  [default: what PATH says]"
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(_FORMATS),
    metavar="FORMAT",
    help=f"One of {', '.join(_FORMATS)}.  [default: what PATH looks like]",
)
@click.option("--parameters", metavar="FILE", help="Names of the optimizer's parameters, in its order, one to a line.")
@selection_options
@json_option
def import_(
    *,
    path: str,
    root: str,
    options: tuple[str, ...],
    step: int | None,
    kind: str | None,
    parameters: str | None,
    only: tuple[str, ...],
    strip: tuple[str, ...],
    rename: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a checkpoint of ROOT from PATH: a .safetensors file, a Hugging Face folder, a torch.save file, a dcp folder.

    Or a folder of torch_checkpointing, or a checkpoint of Hugging Face's Trainer, Accelerate, PEFT, Lightning, DeepSpeed
    (universal) or Megatron (torch_dist). Nothing is unpickled but tensors and plain values. ROOT may be new; the checkpoint becomes its newest.
    Checkpointer tracks a model as model.*: weights without that prefix get it by --rename =model.; those of frameworks
    have it. The optimizers of Trainer and Lightning number their parameters: where the order of the model does not say
    for certain which is which, --parameters does.

    Examples:
      flashckpt import weights/ /checkpoints/run8 --step 0 --rename =model.
      flashckpt import old.pt /checkpoints/run8 --step 1200 --only 'model.*'
      flashckpt import out/checkpoint-500 /checkpoints/run8 --parameters names.txt
    """
    source = Path(path)
    selection = parse_selection(only, strip, rename)
    is_asked = kind is not None
    try:
        if not source.exists() or kind is None:
            kind = detect(source)
        names = None if parameters is None else Path(parameters).read_text(errors="replace").split()
        foreign = open_foreign(source, kind, selection, names, is_asked=is_asked)
    except OSError as error:
        place = error.filename or path
        raise ConfigError(f"{place} cannot be read", found=error.strerror or str(error), remedy="check it") from error
    step = _step(path, step, foreign)
    if is_process_local(root):
        raise ConfigError(f"{root} is process-local: no other process could read the checkpoint")
    store = open_store(root, **parse_options(options))
    store.check(write=True)
    place = direct_writer.begin(store, step, world_size=1)
    nbytes = sum(row.shard.nbytes for row in foreign.rows)
    with progress("importing", nbytes, quiet=as_json) as advance:
        rows = [replace(row, read=_counted(row.read, advance)) for row in foreign.rows]
        direct_writer.write(store, place, 0, rows, foreign.values, job="import")
    direct_writer.finish(store, place)
    document = {
        "from": str(source.absolute()),
        "format": kind,
        "root": store.url,
        "prefix": place.prefix,
        "step": step,
        "generation": place.claim.number,
        "tensors": foreign.tensors,
        "values": len(foreign.values.get("dcp", {}).get("values", {})),
        "nbytes": nbytes,
        "omitted": foreign.omitted,
        "renamed": foreign.renamed,
    }
    show(document, as_json=as_json, table=lambda: _table(document))


def _counted(
    read: Callable[[int, int], memoryview], advance: Callable[[int], None]
) -> Callable[[int, int], memoryview]:
    def counted(start: int, stop: int) -> memoryview:
        advance(stop - start)
        return read(start, stop)

    return counted


def _step(path: str, step: int | None, foreign: Foreign) -> int:
    if step is None and foreign.step is None:
        raise ConfigError(
            f"{path} does not say at which step it was made",
            expected="the optimizer steps done so far",
            state="Nothing was written.",
            remedy="give it: --step N",
        )
    return foreign.step or 0 if step is None else step


def _table(document: dict[str, Any]) -> Table:
    table = new_table("CHECKPOINT", "FROM", ">TENSORS", ">VALUES", ">SIZE", "ROOT")
    table.add_row(
        document["prefix"],
        document["format"],
        str(document["tensors"]),
        str(document["values"]),
        human_bytes(document["nbytes"]),
        document["root"],
    )
    notes = [f"{top} is taken as {label}" for top, label in document["renamed"].items()]
    if document["omitted"]:
        notes.append("not taken: " + "; ".join(document["omitted"]))
    table.caption = "; ".join(notes) or None
    return table
