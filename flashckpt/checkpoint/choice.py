"""The checkpoint that somebody asked for by step and generation, or the newest one; and why there is none. Torch-free."""

from __future__ import annotations

from typing import NoReturn

from flashckpt.checkpoint.catalog import CheckpointInfo, list_checkpoints, newest_checkpoint, verify_manifest
from flashckpt.errors import DamagedError, NoCheckpointError
from flashckpt.storage.store import Store

OURS = ("step-", "generations", "intents", "keep", "leases", "catalog", "history", "LATEST", "ledger", "tokenizers")
"""The beginnings of the names of our objects on a root."""


def checkpoints_of(store: Store) -> list[CheckpointInfo]:
    """Return all checkpoints, damaged ones with their problem; NoCheckpointError where the root is empty or not ours."""
    infos = list_checkpoints(store, damaged=True)
    if not infos:
        refuse_empty(store)
    return infos


def refuse_empty(store: Store) -> NoReturn:
    """Raise the NoCheckpointError of a root that holds no checkpoint: it is empty, or not ours."""
    folders, objects = store.folders(), [info.key for info in store.list() if "/" not in info.key]
    foreign = sorted(name for name in [*folders, *objects] if not name.startswith(OURS))
    if foreign and len(foreign) == len(folders) + len(objects):
        raise NoCheckpointError(
            f"{store.url} is not a checkpoint root",
            found=", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else ""),
            expected="folders like step-000000120.g1",
            remedy="give the root that Checkpointer was given",
        )
    writing = [name for name in folders if name.startswith("step-")]
    raise NoCheckpointError(
        f"{store.url} holds no committed checkpoint" if folders or objects else f"{store.url} is empty",
        found=f"{len(writing)} that were never committed" if writing else "",
        remedy="flashckpt status shows what is in this machine's memory",
    )


def choose_checkpoint(store: Store, step: int | None = None, generation: int | None = None) -> CheckpointInfo:
    """Return the checkpoint of a step and generation, or without either the newest valid one that was not abandoned.

    Raises:
        NoCheckpointError: There is no such checkpoint.
        DamagedError, FormatVersionError: The one that was asked for is damaged, or newer than this program.
    """
    newest = step is None and generation is None
    if newest and (best := newest_checkpoint(store, whole=True)) is not None:
        return best
    infos = checkpoints_of(store)
    if newest:
        raise DamagedError(
            f"{store.url} holds no usable checkpoint",
            found=infos[0].problem or "all of them were abandoned",
            remedy=f"flashckpt ls {store.url}",
        )
    wanted = [info for info in infos if step in (None, info.step) and generation in (None, info.generation)]
    if not wanted:
        asked = [
            f"{name} {number}" for name, number in (("step", step), ("generation", generation)) if number is not None
        ]
        there = ", ".join(f"{info.step}.g{info.generation}" for info in infos[:8])
        raise NoCheckpointError(
            f"{store.url} has no checkpoint of {', '.join(asked)}", found=there, remedy="choose one of these"
        )
    if wanted[0].problem:
        verify_manifest(store, wanted[0].prefix)  # raises what is wrong with it: damaged, or of a newer format
        raise DamagedError(f"the checkpoint {wanted[0].prefix} of {store.url} is damaged", found=wanted[0].problem)
    return wanted[0]
