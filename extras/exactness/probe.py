"""The probe in each rank of a checked script: it writes down what every step begins and ends with, and kills the rank."""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashckpt import Checkpointer
from flashckpt.environment import env
from flashckpt.exactness.leaves import Walk, digest_of_inputs, is_zero
from flashckpt.exactness.records import BEGINS, ENDED, ENDS, MADE, RESTORED, done_file, record_file
from flashckpt.state.registry import StateRegistry


@dataclass(kw_only=True)
class Plan:
    """What one of the three runs is to do.

    Attributes:
        folder: For records and the root.
        steps: It ends after this many, counted over its restart.
        kill_after: Rank 0 is killed in the step behind this many; 0: never.
        start: Which start of the script it is, from 0; None: dlrun's count.
    """

    folder: str
    steps: int
    kill_after: int = 0
    start: int | None = None


class AddedGradients:
    """Notes which tracked models add, in a step, to gradients from before it, and do not set them to zero after all."""

    def __init__(self) -> None:
        self._watched: dict[int, nn.Parameter] = {}
        self._reached = set[int]()
        self._found: dict[int, str] = {}

    def watch(self, tracked: StateRegistry) -> None:
        """Watch parameters that are not watched yet."""
        for label, part in ((label, one) for label, parts in tracked.modules.items() for one in parts):
            for parameter in part.parameters():
                if parameter.requires_grad and id(parameter) not in self._watched:
                    self._watched[id(parameter)] = parameter
                    hook = functools.partial(self._reach, label, parameter)
                    parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    def _reach(self, label: str, parameter: nn.Parameter, _: torch.Tensor) -> None:
        """A gradient comes to a parameter, and is added next to what it has."""
        key, grad = id(parameter), parameter.grad
        if grad is None or is_zero(grad):
            self._found.pop(key, None)
        elif key not in self._reached:
            self._found[key] = label
        self._reached.add(key)

    def taken(self) -> list[str] | None:
        """Return the models of this step, and begin the next; None where no gradient was seen to come, as with FSDP2."""
        found = sorted(set(self._found.values())) if self._reached else None
        self._reached.clear()
        self._found.clear()
        return found


class RankProbe:
    """Observes the first Checkpointer that takes a step."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self._made = plan, 0
        self._folder = Path(plan.folder)
        self._rank = env.RANK
        start = env.FLASHCKPT_RESTART if plan.start is None else plan.start
        self._records = record_file(self._folder, self._rank, start).open("a", buffering=1)
        self._begun = self._folder / "begun"
        self._killed = self._folder / "killed"
        self._inputs: list[str] = []
        self._last: int | None = None
        self.parts: dict[int, Checkpointer] = {}  # by the id of a tracked model, which the Checkpointer keeps
        self._is_seen = False  # whether what the step began with is written down
        self._gradients = AddedGradients()

    def install(self) -> None:
        """Put the observation around the methods of Checkpointer: every script and integration calls those."""
        for name in ("__init__", "track", "restore", "step"):
            original = getattr(Checkpointer, name)
            setattr(Checkpointer, name, functools.wraps(original)(_method(_CALLS[name], self, original)))
        torch.compile = functools.wraps(torch.compile)(functools.partial(_compile, self, torch.compile))

    def write(self, kind: str, step: int, **more: Any) -> None:
        """Write one line, which a kill right behind it cannot take back."""
        self._records.write(json.dumps({"at": [kind, step], **more}) + "\n")

    def observe(self, checkpointer: Checkpointer, kind: str, step: int, **more: Any) -> None:
        """Write down everything that can be seen from the frame that called us."""
        walk = Walk(checkpointer._tracked, reads_sources=kind == ENDS)  # noqa: SLF001 -- has no public name
        self.write(kind, step, leaves=walk.run(sys._getframe(2)), **more)  # noqa: SLF001 -- the frames are what is looked at

    def made(self, root: object) -> str:
        """Return the root of a Checkpointer in place of the script's."""
        self._made += 1
        self.write(MADE, 0, root=str(root))
        return str(self._folder / f"root{self._made}")

    def restored(self, checkpointer: Checkpointer, step: int) -> None:
        """A restore has ended."""
        self._last, self._is_seen = step, False
        self.observe(checkpointer, RESTORED, step, rng=checkpointer._tracked.rng)  # noqa: SLF001 -- has no public name

    def given(self, checkpointer: Checkpointer, module: nn.Module, inputs: Any) -> None:
        """A tracked model is called."""
        if self.begins(checkpointer, module):
            self._inputs.append(f"{digest_of_inputs(inputs):x}")

    def begins(self, checkpointer: Checkpointer, module: nn.Module) -> bool:
        """A tracked model or a part of it is called; return whether for training."""
        if torch.compiler.is_compiling() or not module.training or self._last is None:
            return False
        if not self._is_seen:
            self._is_seen = True
            self._gradients.watch(checkpointer._tracked)  # noqa: SLF001 -- has no public name
            self.observe(checkpointer, BEGINS, self._last + 1)
        return True

    def before_step(self, step: int) -> None:
        """Die here, where it is the turn: behind the fence of the snapshot of the step before."""
        if not self._begun.exists():
            own = self._folder / f"begun.{self._rank}"
            own.write_text(str(step - 1))
            own.replace(self._begun)  # whole: another rank may read it now
        is_due = 0 < self.plan.kill_after < step - int(self._begun.read_text())
        if is_due and self._rank == 0 and not self._killed.exists():
            self._killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, checkpointer: Checkpointer, step: int) -> None:
        """Write down the step, and stand still behind the last one until the command ends all ranks at once."""
        self._last, self._is_seen = step, False
        inputs, self._inputs = self._inputs, []
        self.observe(checkpointer, ENDS, step, inputs=inputs, added=self._gradients.taken())
        if step - int(self._begun.read_text()) >= self.plan.steps:
            done_file(self._folder, self._rank).touch()
            while True:
                signal.pause()


def _init(probe: RankProbe, original: Any, self: Checkpointer, root: Any, **settings: Any) -> None:
    ours = {"snapshot_every": 1, "persist_every": None, "job": None, "replicate": 0, "storage_options": None}
    original(self, probe.made(root), **(settings | ours | {"compression": "off"}))


def _track(probe: RankProbe, original: Any, self: Checkpointer, **things: Any) -> None:
    before = set(map(id, self._tracked.parts()))
    original(self, **things)
    for part in self._tracked.parts():
        if id(part) not in before:
            probe.parts[id(part)] = self
            part.register_forward_pre_hook(
                lambda module, args, kwargs: probe.given(self, module, [args, kwargs]), prepend=True, with_kwargs=True
            )
            for child in part.children():  # of a model whose own methods are called: model.value(x)
                child.register_forward_pre_hook(lambda module, _: _begins(probe, self, module), prepend=True)


def _begins(probe: RankProbe, checkpointer: Checkpointer, module: nn.Module) -> None:
    probe.begins(checkpointer, module)


def _compile(probe: RankProbe, original: Any, model: Any = None, **settings: Any) -> Any:
    """Observe a compiled model from outside: its own hooks may run while it is traced alone."""
    if model is None:
        return lambda one: _compile(probe, original, one, **settings)
    compiled = original(model, **settings)
    if isinstance(compiled, nn.Module):

        def is_called(_: nn.Module, args: Any, kwargs: Any) -> None:
            if checkpointer := probe.parts.get(id(model)):
                probe.given(checkpointer, model, [args, kwargs])

        compiled.register_forward_pre_hook(is_called, prepend=True, with_kwargs=True)
    return compiled


def _restore(probe: RankProbe, original: Any, self: Checkpointer, *args: Any, **settings: Any) -> Any:
    report = original(self, *args, **settings)
    probe.restored(self, report.step if report is not None else 0)
    return report


def _step(
    probe: RankProbe, original: Any, self: Checkpointer, step: int, samples: int | None = None, *, persist: bool = False
) -> None:
    del persist  # nothing of a check is persisted
    probe.before_step(step)
    original(self, step, samples)
    probe.after_step(self, step)


_CALLS = {"__init__": _init, "track": _track, "restore": _restore, "step": _step}


def _method(function: Any, probe: RankProbe, original: Any) -> Any:
    def method(self: Checkpointer, *args: Any, **settings: Any) -> Any:
        return function(probe, original, self, *args, **settings)

    return method


def main(words: list[str]) -> None:
    """Run a script as `python SCRIPT ARGS` would, observed."""
    plan, script, arguments = Plan(**json.loads(words[0])), words[1], words[2:]
    probe = RankProbe(plan)
    probe.install()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise
    probe.write(ENDED, 0)
