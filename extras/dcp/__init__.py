"""Plug-in for torch.distributed.checkpoint, and writer of checkpoints.

`dcp.save` writes our checkpoints, `dcp.load` reads any of them:

    import torch.distributed.checkpoint as dcp
    from flashckpt.dcp import FlashStorageReader, FlashStorageWriter

    dcp.save({"model": model_state, "optimizer": optimizer_state}, storage_writer=FlashStorageWriter(root, step=100))
    dcp.load(state_dict, storage_reader=FlashStorageReader(root, step=100))

Or, for a loop with `checkpoint_id=`, one changed line: `import flashckpt.dcp as dcp` gives `save`, `async_save` and `load`.
docs/interop.md says how names map and what is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashckpt.dcp.calls import async_save, load, save
    from flashckpt.dcp.reader import FlashStorageReader
    from flashckpt.dcp.writer import FlashStorageWriter

__all__ = ["FlashStorageReader", "FlashStorageWriter", "async_save", "load", "save"]

_LAZY = {
    "FlashStorageReader": "flashckpt.dcp.reader",
    "FlashStorageWriter": "flashckpt.dcp.writer",
    **dict.fromkeys(("async_save", "load", "save"), "flashckpt.dcp.calls"),
}


def __getattr__(name: str) -> object:
    """Load a public name on first use: the names of state (`flashckpt.dcp.names`) are free of torch."""
    if name not in _LAZY:
        raise AttributeError(f"module 'flashckpt.dcp' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
