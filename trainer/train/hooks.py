"""What is done beside training, on every rank: outputs, displays, evaluation. Found by entry points, `flashckpt.hooks`.

The trainer's own are "studio" (`flashckpt.trainer.watch.hooks`); without them a run writes its trace and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from flashckpt import entry_points
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.optim.average import WeightAverage, WeightCopy
from flashckpt.trainer.parallel.apply import Parallel
from flashckpt.trainer.train.metrics import StepRecord, Trace
from flashckpt.trainer.train.profile_range import NOTHING, Profiled
from flashckpt.trainer.train.step_phases import PhaseTimer

if TYPE_CHECKING:
    from flashckpt import Checkpointer
    from flashckpt.report import RestoreReport

STUDIO = "studio"


@dataclass(frozen=True, kw_only=True, slots=True)
class HookedRun:
    """The run that hooks are made for, on one rank.

    Attributes:
        config: The run, in its first phase.
        parallel: This rank's part of the model; `parallel.reporter` on the one rank that writes outputs.
        average: The average of the weights, where there is one.
        anchor: Where groups train apart, the weights that they had in common last.
    """

    config: RunConfig
    parallel: Parallel
    average: WeightAverage | None = None
    anchor: WeightCopy | None = None
    profiled: Profiled = NOTHING
    timer: PhaseTimer = field(default_factory=PhaseTimer)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.parallel.device


class TrainerHooks:
    """Every method does nothing: derive from this class, and write those that you need.

    They are called on every rank in one order, so each may run collectives, but for `spike`, which the reporting rank calls.
    """

    def __init__(self, run: HookedRun) -> None:
        self.run = run

    def attach(self, ckpt: Checkpointer) -> None:
        """See a new Checkpointer, before its `restore()`: at the start, and after each rollback."""

    def restored(self, report: RestoreReport | None) -> None:
        """Take up what `restore()` returned."""

    def opened(self, config: RunConfig, parallel: Parallel, after: int) -> None:
        """Begin outputs behind step `after`: at the start, with each phase, and after a rollback, which undid later steps."""

    def before(self, step: int) -> None:
        """Prepare for a step, before its data is read."""

    def trained(self, step: int) -> None:
        """Act directly behind a step."""

    def finished(self, record: StepRecord) -> None:
        """Write a finished step."""

    def started(self, step: int, line: str) -> None:
        """Write how long the start took, once, behind the first step of this process."""

    def spike(self, step: int, loss: float, norm: float, ids: Sequence[int], action: str) -> None:
        """Write a loss that the guard found too high, with the samples of its batch."""

    def between(self, step: int, ckpt: Checkpointer | None) -> None:
        """Look at the model between two steps. A method that takes long does so in `ckpt.paused()`."""

    def close(self) -> None:
        """End everything; the run is over, or has failed."""


class _TraceOnly(TrainerHooks):
    """Writes the trace, where the studio is not installed."""

    _trace: Trace | None = None

    def opened(self, config: RunConfig, parallel: Parallel, after: int) -> None:
        self.close()
        self._trace = Trace(config.log.folder, after) if parallel.reporter else None

    def finished(self, record: StepRecord) -> None:
        if self._trace is not None:
            self._trace.write(record.to_line())

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()


def hooks_of(run: HookedRun) -> AllHooks:
    """Return the hooks of all installed packages for a run.

    Raises:
        ConfigError: One cannot be loaded, or the run asks for what only the studio does, and it is not installed.
    """
    config = run.config
    if config.eval.every or config.samples.every or run.profiled:
        entry_points.load(entry_points.HOOKS, STUDIO)
    kinds: dict[str, Callable[[HookedRun], TrainerHooks]] = {}
    for entry in entry_points.every(entry_points.HOOKS):
        if (kind := entry.load_if_installed()) is not None:
            kinds[entry.name] = kind
    if STUDIO not in kinds:
        kinds[STUDIO] = _TraceOnly
    return AllHooks(run, [kind(run) for kind in kinds.values()])


class AllHooks(TrainerHooks):
    """Calls the method of the same name of each, in their order."""

    def __init__(self, run: HookedRun, each: Sequence[TrainerHooks]) -> None:
        super().__init__(run)
        self.each = each


def _of_each(name: str) -> Callable[..., None]:
    def call(self: AllHooks, *words: object) -> None:
        for one in self.each:
            getattr(one, name)(*words)

    return call


for _name in [name for name in vars(TrainerHooks) if not name.startswith("_")]:
    setattr(AllHooks, _name, _of_each(_name))
