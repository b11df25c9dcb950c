"""A plug-in for flashckpt: a store, a command and a format.

`shelf://NAME` is a folder of ~/shelf, `flashckpt shelf` lists the runs that are there, and `flashckpt import` reads .npz
files of numpy. Its pyproject.toml declares the three. After `pip install ./examples/plugin` a Checkpointer takes `shelf://run7` as its root,
and so do the persister and every command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from flashckpt.cli.common import Command, json_option, new_table, show
from flashckpt.storage.posix import PosixStore


class ShelfStore(PosixStore):
    """A folder of the shelf. What a store has to do, `flashckpt.storage.store.Store` says; this one inherits it."""

    OPTIONS = frozenset({"folder"})

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        super().__init__(shelf_folder(options) / url.partition("://")[2])
        self.url = url


def shelf_folder(options: dict[str, Any]) -> Path:
    """Return where the shelf is."""
    return Path(options.get("folder") or Path.home() / "shelf")


def read_npz(path: Path) -> dict[str, Any]:
    """Return the arrays of a file of numpy.savez."""
    import torch  # commands start without it

    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@click.command(cls=Command)
@json_option
def shelf(*, as_json: bool) -> None:
    """List the runs on the shelf."""
    folder = shelf_folder({})
    runs = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []

    def table() -> object:
        found = new_table("RUN")
        for run in runs:
            found.add_row(f"shelf://{run}")
        return found

    show({"folder": str(folder), "runs": runs}, as_json=as_json, table=table)
