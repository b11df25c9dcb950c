"""`flashckpt verify`: every byte against its digest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from flashckpt.checkpoints import CheckpointInfo, read_manifest
from flashckpt.cli_common import (
    Command,
    checkpoints_of,
    choose,
    human_bytes,
    json_option,
    new_table,
    open_root,
    root_options,
    show,
    step_option,
)
from flashckpt.digest import CHUNK_BYTES
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.persist import refuse_gaps
from flashckpt.sources import Span, StorageSource
from flashckpt.store import Store

READ_CHUNKS = 8
THREADS = 4


@click.command(cls=Command)
@root_options
@step_option
@click.option("--all", "everything", is_flag=True, help="Verify every checkpoint, not only the newest.")
@json_option
def verify(root: str, options: tuple[str, ...], step: str | None, everything: bool, as_json: bool) -> int:
    """Read every byte of a checkpoint of ROOT and compare it with its digest.

    Names each damaged tensor and object. Exit code 32 if anything is damaged.

    Examples:
      flashckpt verify /checkpoints/run7
      flashckpt verify s3://bucket/run7 --all --json
    """
    store = open_root(root, options)
    infos = checkpoints_of(store) if everything else [choose(store, step)]
    with _progress(sum(info.nbytes for info in infos), quiet=as_json) as advance:
        results = [verify_checkpoint(store, info, advance) for info in infos]
    show({"root": store.url, "checkpoints": results}, as_json=as_json, table=lambda: _table(results))
    return DamagedError.exit_code if any(result["damaged"] for result in results) else 0


def verify_checkpoint(store: Store, info: CheckpointInfo, advance: Callable[[int], None]) -> dict[str, Any]:
    """Read one checkpoint whole; return what was read and every range that does not match.

    Args:
        store: The root.
        info: The checkpoint.
        advance: Called with the bytes read, from several threads.
    """
    result: dict[str, Any] = {"prefix": info.prefix, "step": info.step, "nbytes": 0, "damaged": []}
    if info.problem:
        return result | {"damaged": [{"tensor": "", "problem": info.problem}]}
    try:
        manifest = read_manifest(store, info)
        refuse_gaps(manifest.table)
    except FlashckptError as error:
        return result | {"damaged": [{"tensor": "", "problem": error.problem}]}
    source = StorageSource(store, manifest, info.prefix)

    def check(span: Span) -> dict[str, str] | None:
        try:
            source.views([span])
        except (FlashckptError, OSError) as error:
            found = error.found if isinstance(error, FlashckptError) else ""
            problem = (error.problem if isinstance(error, FlashckptError) else str(error)) + (
                f": {found}" if found else ""
            )
            return {"tensor": manifest.table.fqn(span.row), "problem": problem}
        finally:
            advance(span.stop - span.start)
        return None

    with ThreadPoolExecutor(THREADS, thread_name_prefix="flashckpt-verify") as pool:
        damaged = [one for one in pool.map(check, _spans(source)) if one is not None]
    return result | {"nbytes": int(manifest.table.nbytes.sum()), "damaged": damaged}


def _spans(source: StorageSource) -> Iterator[Span]:
    table = source.manifest.table
    for row in range(len(table)):
        end = int(table.nbytes[row])
        for start in range(0, end, READ_CHUNKS * CHUNK_BYTES):
            yield Span(row=row, start=start, stop=min(start + READ_CHUNKS * CHUNK_BYTES, end))


class _progress:  # noqa: N801 -- a context manager that reads like a function
    """A progress bar on standard error; nothing where it is no terminal."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return lambda nbytes: self._bar.advance(self._task, nbytes)

    def __exit__(self, *details: object) -> None:
        self._bar.stop()


def _table(results: list[dict[str, Any]]) -> Table:
    table = new_table("CHECKPOINT", "RESULT", ">READ", "PROBLEM")
    for result in results:
        first, *rest = result["damaged"] or [{"problem": ""}]
        word = "damaged" if result["damaged"] else "intact"
        table.add_row(result["prefix"], word, human_bytes(result["nbytes"]), first["problem"])
        for one in rest:
            table.add_row("", "", "", one["problem"])
    return table
