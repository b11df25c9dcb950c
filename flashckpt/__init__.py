"""flashckpt: asynchronous checkpointing and exact data resume for distributed PyTorch training.

Importing this package is cheap and does not import torch: the persisting daemon and the
command line use its torch-free half. The public names below are loaded on first use.

Modules here: What all may import: errors, environment, logs, faults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashckpt.report import RestoreReport
    from flashckpt.session.checkpointer import Checkpointer

__version__ = "0.1.0"
__all__ = ["Checkpointer", "RestoreReport", "__version__"]

_LAZY = {"Checkpointer": "flashckpt.session.checkpointer", "RestoreReport": "flashckpt.report"}


def __getattr__(name: str) -> object:
    """Load a public name on first use, so that `import flashckpt` stays free of torch."""
    if name not in _LAZY:
        raise AttributeError(f"module 'flashckpt' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
