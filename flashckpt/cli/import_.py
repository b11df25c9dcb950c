"""`flashckpt import`: a safetensors, torch.save or dcp checkpoint as one committed checkpoint of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from flashckpt.checkpoint import direct_writer
from flashckpt.cli.common import Command, human_bytes, json_option, new_table, parse_options, show
from flashckpt.cli.export import FORMATS, selection_options
from flashckpt.errors import ConfigError
from flashckpt.interop.incoming import detect, open_foreign
from flashckpt.interop.selection import parse_selection
from flashckpt.storage.factory import is_process_local, open_store


@click.command("import", cls=Command)
@click.argument("path", type=click.Path())
@click.argument("root", type=click.Path())
@click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="Storage option of ROOT.")
@click.option("--step", type=click.IntRange(0), required=True, metavar="N", help="Step of the new checkpoint.")
@click.option("--format", "kind", type=click.Choice(FORMATS), help="  [default: what PATH looks like]")
@selection_options
@json_option
def import_(
    *,
    path: str,
    root: str,
    options: tuple[str, ...],
    step: int,
    kind: str | None,
    only: tuple[str, ...],
    strip: tuple[str, ...],
    rename: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a checkpoint of ROOT from PATH: a .safetensors file, a Hugging Face folder, a torch.save file, a dcp folder.

    Nothing is unpickled but tensors and plain values. ROOT may be new; the checkpoint becomes its newest.
    Checkpointer tracks a model as model.*: weights without that prefix get it by --rename =model.

    Examples:
      flashckpt import weights/ /checkpoints/run8 --step 0 --rename =model.
      flashckpt import old.pt /checkpoints/run8 --step 1200 --only 'model.*'
    """
    source = Path(path)
    selection = parse_selection(only, strip, rename)
    try:
        if not source.exists() or kind is None:
            kind = detect(source)
        foreign = open_foreign(source, kind, selection)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", found=error.strerror or str(error), remedy="check PATH") from error
    if is_process_local(root):
        raise ConfigError(f"{root} lives in one process only: nobody could read the checkpoint")
    store = open_store(root, **parse_options(options))
    store.check(write=True)
    place = direct_writer.begin(store, step, world_size=1)
    direct_writer.write(store, place, 0, foreign.rows, foreign.values, job="import")
    direct_writer.finish(store, place)
    nbytes = sum(row.shard.nbytes for row in foreign.rows)
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
    }
    show(document, as_json=as_json, table=lambda: _table(document))


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
    return table
