"""`save`, `async_save` and `load` with the arguments of torch's: one changed import moves a loop to flashckpt.

import flashckpt.dcp as dcp  # was: import torch.distributed.checkpoint as dcp

future = dcp.async_save(state, checkpoint_id=f"/checkpoints/run8/{step}")
dcp.load(state, checkpoint_id=f"/checkpoints/run8/{step}")
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch.distributed.checkpoint as torch_dcp

from flashckpt.dcp.reader import FlashStorageReader
from flashckpt.dcp.writer import FlashStorageWriter
from flashckpt.errors import ConfigError

CheckpointId = str | os.PathLike[str]


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    **others: Any,
) -> Any:
    """Save as `torch.distributed.checkpoint.save` does, as a checkpoint of the root that holds `checkpoint_id`.

    Args:
        state_dict: As torch's.
        checkpoint_id: ROOT/STEP; the step may have a name in front: run8/step-120, run8/checkpoint-120.
        storage_writer: Instead of it: passed on as it is.
        storage_options: As `FlashStorageWriter`.
        keep_last: The same.
        **others: As torch's.

    Returns:
        torch's metadata of the save.

    Raises:
        ConfigError: `checkpoint_id` does not end in a step.
    """
    writer = storage_writer or _writer(checkpoint_id, storage_options, keep_last)
    return torch_dcp.save(state_dict, storage_writer=writer, **others)  # type: ignore[attr-defined]  # torch exports it without saying so


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    **others: Any,
) -> Any:
    """Save in the background as `torch.distributed.checkpoint.async_save` does; return its Future.

    Arguments and errors as `save`. The state is that of the call; the copy that it waits for is torch's.
    """
    writer = storage_writer or _writer(checkpoint_id, storage_options, keep_last)
    return torch_dcp.async_save(state_dict, storage_writer=writer, **others)  # type: ignore[attr-defined]  # as above


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    **others: Any,
) -> None:
    """Load as `torch.distributed.checkpoint.load` does; arguments and errors as `save`."""
    if storage_reader is None:
        root, step = root_and_step(checkpoint_id)
        storage_reader = FlashStorageReader(root, step=step, storage_options=storage_options)
        storage_reader.checkpoint_id = checkpoint_id or root
    torch_dcp.load(state_dict, storage_reader=storage_reader, **others)  # type: ignore[attr-defined]  # as above


def _writer(
    checkpoint_id: CheckpointId | None, options: Mapping[str, Any] | None, keep_last: int | None
) -> FlashStorageWriter:
    root, step = root_and_step(checkpoint_id)
    writer = FlashStorageWriter(root, step=step, storage_options=options, keep_last=keep_last)
    writer.checkpoint_id = checkpoint_id or root
    return writer


def root_and_step(checkpoint_id: CheckpointId | None) -> tuple[str, int]:
    """Return the root and the step of a place as torch's users name it; ConfigError where it ends in no number."""
    text = "" if checkpoint_id is None else os.fspath(checkpoint_id).rstrip("/")
    root, _, name = text.rpartition("/")
    step = re.fullmatch(r"(?:.*\D)?(\d{1,18})", name)
    if step is None or re.search(r"\.g\d+$", name) or not root or root.endswith(":/"):
        raise ConfigError(
            "cannot derive root and step from this checkpoint_id",
            found=f"checkpoint_id={checkpoint_id!r:.200}",
            expected="a path that ends in the step, e.g. /checkpoints/run8/120",
            state="Nothing was saved or loaded.",
            remedy="give such a path, or storage_writer=FlashStorageWriter(root, step=...) and storage_reader=",
        )
    return root, int(step[1])


__all__ = ["async_save", "load", "save"]
