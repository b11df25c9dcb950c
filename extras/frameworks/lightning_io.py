"""Lightning's own checkpoints, crash-safe and without pickle: what `Trainer(plugins=[FlashCheckpointIO()])` writes through."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from flashckpt.errors import ConfigError
from flashckpt.interop.nested_state import read_folder, write_folder
from flashckpt.interop.target import remove_whole


class FlashCheckpointIO(CheckpointIO):  # type: ignore[misc]  # lightning is not there when types are checked
    """Stores Lightning's checkpoint dict in a folder under the name that Lightning chose ("epoch=0-step=120.ckpt").

        Trainer(plugins=[FlashCheckpointIO()], callbacks=[ModelCheckpoint(...)])
        trainer.fit(module, loader, ckpt_path="last")

    The name appears when all of it is durable, and disappears at once; a folder that is replaced stays until then.
    Loading gives the same dict bit for bit, tensors on the CPU; no code of a file is ever run. `FlashCheckpoint`,
    the callback, may be used beside it: it has a separate root, and restores from there.
    """

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; it is durable when this returns.

        Args:
            checkpoint: What `Trainer.dump_checkpoint` gives.
            path: The folder.
            storage_options: Must be None.

        Raises:
            UnsupportedStateError: A part cannot be held without pickling it; names it. Nothing was written.
            ConfigError: The path is no local one, the folder holds something else, options are given, or the
                strategy loads without a CheckpointIO.
            StoreError: The disk is full or refuses; what was there stays.
        """
        if storage_options is not None:
            raise ConfigError(
                "a checkpoint in a folder has no storage options",
                found=f"storage_options={storage_options!r:.80}",
                state="Nothing was written.",
                remedy="call save_checkpoint(path) without them",
            )
        _refuse_strategy()
        step = checkpoint.get("global_step", 0)
        write_folder(
            checkpoint,
            _local(path),
            step=step if type(step) is int and step >= 0 else 0,
            job="lightning",
            remedy=_remedy,
        )

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint.

        Args:
            path: The folder.
            map_location: A device for its tensors; None: the CPU.
            weights_only: Makes no difference: nothing is ever unpickled.

        Raises:
            NoCheckpointError: There is none, or one of another kind.
            DamagedError: Its bytes do not match their digests.
            ConfigError: `map_location` is no device.
        """
        del weights_only
        if map_location is not None and not isinstance(map_location, (str, int, torch.device)):
            raise ConfigError(
                "a map_location of this kind is not supported",
                found=type(map_location).__qualname__,
                expected="None or a device",
                remedy="load on the CPU and move the tensors",
            )
        return read_folder(_local(path), device="cpu" if map_location is None else map_location)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, of this plugin or a file of Lightning's; a kill meanwhile leaves nothing under its name."""
        remove_whole(_local(path))


def _local(path: Any) -> Path:
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        raise ConfigError(
            "this plugin writes to local and shared file systems only",
            found=text,
            expected="a path",
            remedy="give ModelCheckpoint a local dirpath; the callback FlashCheckpoint takes s3://, gs:// and others as root",
        )
    return Path(text.removeprefix("file://"))


def _refuse_strategy() -> None:
    """Refuse a save that its Trainer could never load: Lightning passes no strategy, so it is looked for on the stack."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, (FSDPStrategy, ModelParallelStrategy)):
            raise ConfigError(
                "this strategy saves through a CheckpointIO and loads without it",
                found=type(caller).__qualname__,
                expected="a strategy whose checkpoints a CheckpointIO loads too: DDP, one device",
                state="Nothing was written.",
                remedy="use the callback FlashCheckpoint, or leave the plugin out",
            )
        frame = frame.f_back


def _remedy(place: str) -> str:
    top, _, rest = place.partition(".")
    if top.endswith("hyper_parameters"):
        name = rest.partition(".")[0] or "NAME"
        return f"self.save_hyperparameters(ignore=[{name!r}]), or pass it as a number, text, list or dict"
    if top == "callbacks":
        return "return numbers, texts and tensors from the callback's state_dict(), or leave that callback out"
    return f"convert it in on_save_checkpoint, or remove it there: del checkpoint[{top!r}]; flashckpt never pickles"


__all__ = ["FlashCheckpointIO"]
