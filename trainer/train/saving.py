"""How a run's state is tracked, and why a checkpoint cannot be continued."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flashckpt.errors import ConfigError, FlashckptError, SamplerStateError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.changes import compare, other_data, refuse_changes
from flashckpt.trainer.parallel.groups import group_label

if TYPE_CHECKING:
    from flashckpt import Checkpointer
    from flashckpt.trainer.optim.outer import OuterOptimizer
    from flashckpt.trainer.parallel.apply import Parallel


def checkpointer(config: RunConfig, parallel: Parallel, outer: OuterOptimizer | None, **tracked: Any) -> Checkpointer:
    """Return a Checkpointer that tracks everything a resume needs: the weights, and what is `tracked` beside them."""
    from flashckpt import Checkpointer

    settings = config.checkpoint
    ckpt = Checkpointer(**{**settings.plain(), "job": settings.job or None})
    fenced = ("ema",) if outer is None else ("model", "outer")  # group weights belong to their optimizer
    ckpt.track(**weights_of(parallel, outer), **tracked, rng=True, fenced=fenced, mesh=parallel.mesh)
    return ckpt


@contextlib.contextmanager
def waiting_for_data(current: Callable[[], Checkpointer | None]) -> Iterator[None]:
    """Expect no step while data is waited for; the `current` checkpointer of a rollback may be closed meanwhile."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FlashckptError):
            if (ckpt := current()) is not None:
                stack.enter_context(ckpt.paused())
        yield


def weights_of(parallel: Parallel, outer: OuterOptimizer | None) -> dict[str, Any]:
    """Return what is tracked of the weights by name: where groups train apart, those of this rank's group are not `model`.

    `model` is what any reader of a checkpoint takes, so it has to be the same in all groups: what they had in common last.
    """
    if outer is None:
        return {"model": parallel.parts}
    momentum = None if outer.momentum is None else outer.momentum.modules
    return {group_label(parallel.group): parallel.parts, "model": outer.anchor.modules, "outer": momentum}


def explain(config: RunConfig, error: FlashckptError) -> None:
    """Raise ConfigError or DataError instead of `error` if a changed setting or other data is the reason."""
    from flashckpt.trainer.train.recorded_config import recorded_config

    settings = config.checkpoint
    before = recorded_config(settings.root, settings.job or None, settings.storage_options)
    if before is None:
        return
    try:
        refuse_changes(compare(before, config))
    except ConfigError as clearer:
        raise clearer from error
    if isinstance(error, SamplerStateError):
        raise other_data(error) from error
