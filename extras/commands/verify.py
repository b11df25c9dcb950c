"""`flashckpt verify`: every byte against its digest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import click
import numpy as np
from rich.table import Table

from flashckpt.checkpoint.catalog import CheckpointInfo, list_checkpoints, read_manifest
from flashckpt.checkpoint.choice import checkpoints_of
from flashckpt.checkpoint.merging import refuse_gaps
from flashckpt.cli.common import (
    Command,
    choose,
    human_bytes,
    json_option,
    jumps,
    new_table,
    numbers_of,
    open_root,
    root_options,
    show,
    step_option,
    words_of,
)
from flashckpt.commands.progress import progress
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.planning.pieces import GAP_BYTES, JOB_BYTES
from flashckpt.restore.sources import Spans, StorageSource
from flashckpt.storage.posix import PosixStore
from flashckpt.storage.store import Store

THREADS = 4


@click.command(cls=Command)
@root_options
@step_option
@click.option("--all", "everything", is_flag=True, help="Verify every checkpoint, not only the newest.")
@click.option(
    "--numbers",
    is_flag=True,
    help="Show also each tensor with NaN or infinity, and whether it became so; and norms that jumped tenfold.",
)
@json_option
def verify(
    *, root: str, options: tuple[str, ...], step: str | None, everything: bool, numbers: bool, as_json: bool
) -> int:
    """Read every byte of a checkpoint of ROOT and compare it with its digest.

    Names each damaged tensor and object, and newer checkpoints whose MANIFEST is damaged. Exit code 32 if anything is.

    Examples:
      flashckpt verify /checkpoints/run7
      flashckpt verify s3://bucket/run7 --all --json
    """
    store = open_root(root, options)
    if isinstance(store, PosixStore):
        store.past_cache = True  # what the disk has, not what the kernel remembers of it
    infos = checkpoints_of(store) if everything else [choose(store, step)]
    if step is None and not everything:  # newer checkpoints that are damaged
        broken = [info for info in list_checkpoints(store, damaged=True, whole=True) if info.problem]
        infos = [*(info for info in broken if info.identity > infos[0].identity), *infos]
    with progress("verifying", sum(info.nbytes for info in infos), quiet=as_json) as advance:
        results = [verify_checkpoint(store, info, advance) for info in infos]
    there = list_checkpoints(store) if numbers else []
    for result in results if numbers else []:
        result["numbers"] = _odd_numbers(store, there, result)
    show({"root": store.url, "checkpoints": results}, as_json=as_json, table=lambda: _table(results))
    return DamagedError.exit_code if any(result["damaged"] for result in results) else 0


def _odd_numbers(store: Store, there: Sequence[CheckpointInfo], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tensors of a checkpoint that hold NaN or infinity, or whose norm jumped since the one before, as MANIFESTs say."""
    if result["damaged"]:
        return []
    found = numbers_of(read_manifest(store, result["prefix"], values=False))
    odd = [{"tensor": fqn} | one for fqn, one in found.items() if one["largest"] is None]
    for before in sorted([info for info in there if info.step < result["step"]], key=lambda info: info.identity)[::-1]:
        try:
            earlier = numbers_of(read_manifest(store, before, values=False))
        except FlashckptError:  # damaged, or deleted meanwhile: it says nothing of this one
            continue
        jumped = jumps(earlier, found)
        names = {one["tensor"] for one in odd}
        odd += [
            {"tensor": one["fqn"], **found[one["fqn"]], "norm_before": one["norm"][0], "step_before": before.step}
            for one in jumped
            if one["fqn"] not in names
        ]
        break
    return odd


def verify_checkpoint(store: Store, info: CheckpointInfo, advance: Callable[[int], None]) -> dict[str, Any]:
    """Read one checkpoint whole; return what was read and every range that does not match.

    `advance` is called with the bytes read, from several threads.
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

    def check(spans: Sequence[Span]) -> list[dict[str, str]]:
        try:
            source.verified(Spans([s.row for s in spans], [s.start for s in spans], [s.stop for s in spans]))
        except (FlashckptError, OSError) as error:
            if len(spans) > 1:
                return [one for span in spans for one in check([span])]
            found = [_damage(manifest.table.fqn(spans[0].row), error)]
        else:
            found = []
        advance(sum(span.stop - span.start for span in spans))
        return found

    with ThreadPoolExecutor(THREADS, thread_name_prefix="flashckpt-verify") as pool:
        damaged = [one for found in pool.map(check, requests_of(manifest.table)) for one in found]
    return result | {"nbytes": int(manifest.table.nbytes.sum()), "damaged": damaged}


class Span(NamedTuple):
    """Whole chunks of one row, in bytes."""

    row: int
    start: int
    stop: int


def _damage(tensor: str, error: Exception) -> dict[str, str]:
    if not isinstance(error, FlashckptError):
        return {"tensor": tensor, "problem": str(error)}
    return {"tensor": tensor, "problem": error.problem + (f": {error.found}" if error.found else "")}


def requests_of(table: ShardTable) -> list[list[Span]]:
    """Return all chunks of a checkpoint, neighbours in one object together, as a restore of everything reads them."""
    order = np.lexsort((table.byte_offset, table.object_id))
    requests: list[list[Span]] = []
    last_object, first, last = -1, 0, 0
    for row in order.tolist():
        number, place, end = int(table.object_id[row]), int(table.byte_offset[row]), int(table.nbytes[row])
        for start in range(0, end, JOB_BYTES):
            span = Span(row=row, start=start, stop=min(start + JOB_BYTES, end))
            near = number == last_object and place + start - last <= GAP_BYTES
            if near and place + span.stop - first <= JOB_BYTES:
                requests[-1].append(span)
            else:
                requests.append([span])
                last_object, first = number, place + start
            last = place + span.stop
    return requests


def _table(results: list[dict[str, Any]]) -> Table:
    table = new_table("CHECKPOINT", "RESULT", ">READ", "PROBLEM")
    for result in results:
        first, *rest = result["damaged"] or [{"problem": ""}]
        word = "damaged" if result["damaged"] else "intact"
        table.add_row(result["prefix"], word, human_bytes(result["nbytes"]), first["problem"])
        for one in rest:
            table.add_row("", "", "", one["problem"])
        for one in result.get("numbers", []):
            since = f", {one['norm_before']:.3g} in step {one['step_before']}" if "step_before" in one else ""
            table.add_row("", "", "", f"{one['tensor']}: {words_of(one)}{since}")
    return table
