"""Groups of ranks that train apart between synchronisations (`parallel.sync_every`): what does not go with them. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from flashckpt.errors import LayoutError
from flashckpt.trainer.config import RunConfig


def group_label(group: int) -> str:
    """Return the name under which a group tracks its parameters; the synchronised ones are `model`."""
    return f"group{group}"


def run_of_group(config: RunConfig) -> RunConfig:
    """Return the run of one group, where groups are separate runs: its part of the batch, and folders below those of the run.

    Raises:
        LayoutError: the global batch does not divide.
    """
    parallel, name = config.parallel, f"group{config.parallel.group}"
    if not parallel.groups:
        return config
    samples, rest = divmod(config.train.global_batch, parallel.groups)
    if rest:
        raise _refused("each group trains as many samples", config, f"train.global_batch = {config.train.global_batch}")
    saved = config.checkpoint
    return replace(
        config,
        train=replace(config.train, global_batch=samples),
        checkpoint=replace(
            saved, root=f"{saved.root}/{name}" if saved.root else "", job=saved.job and f"{saved.job}-{name}"
        ),
        log=replace(config.log, folder=f"{config.log.folder}/{name}"),
    )


def common_settings(config: RunConfig) -> str:
    """Return what has to be the same in all groups that are separate runs, as text; of the run of one of them."""
    parallel, train = config.parallel, config.train
    return (
        f"parallel.groups = {parallel.groups}, sync_every = {parallel.sync_every}, outer_rate = {parallel.outer_rate},"
        f" outer_momentum = {parallel.outer_momentum}, train.global_batch = {train.global_batch * parallel.groups},"
        f" seq_len = {train.seq_len}, seed = {train.seed}"
    )


def rosters_of(config: RunConfig) -> str:
    """Return where the groups of a run agree on their synchronisations, from the run of one of them."""
    return f"{config.checkpoint.root.removesuffix(f'/group{config.parallel.group}')}/synchronisations"


def check_groups(config: RunConfig, padding: int) -> None:
    """Refuse what does not go with groups that train apart.

    Raises:
        LayoutError: something does not; the message says why.
    """
    if not config.parallel.sync_every:
        return
    reasons = {
        "parallel.dp_replicate is the number of groups, and one would be synchronised with none": (
            config.parallel.dp_replicate == 1 and not config.parallel.groups,
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
        **_of_separate_runs(config),
    }
    for reason, (does_apply, found) in reasons.items():
        if does_apply:
            raise _refused(reason, config, found)


def _of_separate_runs(config: RunConfig) -> dict[str, tuple[bool, str]]:
    parallel, steps, snapshots = config.parallel, config.train.steps, config.checkpoint.snapshot_every
    if not parallel.groups:
        return {}
    return {
        "parallel.group is the number of one of the groups": (
            not 0 <= parallel.group < parallel.groups,
            f"parallel.groups = {parallel.groups}, parallel.group = {parallel.group}",
        ),
        "groups are ranks of one run, or separate runs": (
            parallel.dp_replicate > 1,
            f"parallel.groups = {parallel.groups}, parallel.dp_replicate = {parallel.dp_replicate}",
        ),
        "groups that are separate runs agree by objects on storage": (not config.checkpoint.root, "no checkpoint.root"),
        "samples are dealt for whole intervals": (steps % parallel.sync_every > 0, f"train.steps = {steps}"),
        "a snapshot has to follow each synchronisation": (
            parallel.sync_every % snapshots > 0,
            f"checkpoint.snapshot_every = {snapshots}",
        ),
        "one group cannot leave out samples that another may have to train": (
            config.guard.on_spike == "rollback",
            "guard.on_spike = rollback",
        ),
        "shares of samples are counted in one order": (bool(config.phase.each), f"{len(config.phase.each)} [[phase]]"),
    }


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
