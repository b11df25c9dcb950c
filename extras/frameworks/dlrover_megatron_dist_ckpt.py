"""The call shapes of DLRover's `megatron_dist_ckpt`: those of `flashckpt.integrations.dlrover_megatron` but for their order.

from flashckpt.integrations.dlrover_megatron_dist_ckpt import load_checkpoint, save_checkpoint
# was: from dlrover.trainer.torch.flash_checkpoint.megatron_dist_ckpt import load_checkpoint, save_checkpoint
"""

from __future__ import annotations

from typing import Any

from flashckpt.integrations import dlrover_megatron
from flashckpt.integrations.dlrover_checkpoints import StorageType, refuse_strategy
from flashckpt.integrations.dlrover_megatron import close_checkpoints, wait_latest_checkpoint


def save_checkpoint(  # noqa: PLR0917 -- the positions of DLRover's, whose place it takes
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    storage_type: StorageType = StorageType.DISK,
    comm_backend: str = "",
    deletion_strategy: Any = None,
    save_timeout: float = 600,
    **options: Any,
) -> None:
    """As `dlrover_megatron.save_checkpoint`; `deletion_strategy` must be None."""
    del comm_backend, save_timeout
    refuse_strategy(deletion_strategy)
    flops = num_floating_point_operations_so_far
    dlrover_megatron.save_checkpoint(iteration, model, optimizer, opt_param_scheduler, flops, storage_type, **options)


def load_checkpoint(  # noqa: PLR0917 -- the positions of DLRover's, whose place it takes
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    comm_backend: str = "",
    deletion_strategy: Any = None,
    save_timeout: float = 600,
    **options: Any,
) -> tuple[int, float]:
    """As `dlrover_megatron.load_checkpoint`; `deletion_strategy` must be None."""
    del comm_backend, save_timeout
    refuse_strategy(deletion_strategy)
    return dlrover_megatron.load_checkpoint(model, optimizer, opt_param_scheduler, load_arg, strict, **options)


__all__ = ["StorageType", "close_checkpoints", "load_checkpoint", "save_checkpoint", "wait_latest_checkpoint"]
