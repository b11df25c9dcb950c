"""Groups of ranks that train apart between synchronisations (`parallel.sync_every`): what does not go with them. Torch-free."""

from __future__ import annotations

from flashckpt.errors import LayoutError
from flashckpt.trainer.config import RunConfig


def group_label(group: int) -> str:
    """Return the name under which a group tracks its parameters; the synchronised ones are `model`."""
    return f"group{group}"


def check_groups(config: RunConfig, padding: int) -> None:
    """Refuse what does not go with groups that train apart.

    Args:
        config: The run.
        padding: Rows of a step without a sample.

    Raises:
        LayoutError: something does not; the message says why.
    """
    if not config.parallel.sync_every:
        return
    reasons = {
        "parallel.dp_replicate is the number of groups, and one would be synchronised with none": (
            config.parallel.dp_replicate == 1,
            "parallel.dp_replicate = 1",
        ),
        "DDP averages gradients over the groups in each step": (
            config.parallel.data_parallel == "ddp",
            "parallel.data_parallel = ddp",
        ),
        "with zero = 0 the ranks of one row would be in several groups": (
            config.parallel.zero == 0 and config.parallel.cp > 1,
            f"parallel.zero = 0, parallel.cp = {config.parallel.cp}",
        ),
        "the outer optimizer works where the parameters are reduced, on the device": (
            config.parallel.offload != "none",
            f"parallel.offload = {config.parallel.offload}",
        ),
        "routers and experts add up what all data-parallel ranks have in each step": (
            config.model.experts > 0,
            f"model.experts = {config.model.experts}",
        ),
        "an average of the weights would be another in each group": (
            config.ema.decay > 0,
            f"ema.decay = {config.ema.decay}",
        ),
        "the groups would have different numbers of samples, and count alike": (
            padding > 0,
            f"train.global_batch = {config.train.global_batch}, {padding} rows of padding",
        ),
    }
    for reason, (does_apply, found) in reasons.items():
        if does_apply:
            raise _refused(reason, config, found)


def refuse_check(config: RunConfig) -> None:
    """Refuse a comparison with one process.

    Raises:
        LayoutError: groups train apart, which no run of one process does.
    """
    if config.parallel.sync_every:
        raise _refused("one process has one group, and trains otherwise", config, "--check")


def _refused(reason: str, config: RunConfig, found: str) -> LayoutError:
    return LayoutError(
        f"parallel.sync_every is incompatible with this run: {reason}",
        found=f"parallel.sync_every = {config.parallel.sync_every}, {found}",
        expected="parallel.sync_every = 0, or a run without the other",
        state="Nothing was started.",
        remedy="change one of the two settings",
    )
