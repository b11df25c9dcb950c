"""Checkpoints of training frameworks as state dicts under the names that `track(model=, optimizer=)` gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashckpt.interop import optimizer_names
from flashckpt.interop.state_dicts import StateDict
from flashckpt.state import pytree

MODEL, OPTIMIZER, SCHEDULER = "model", "optimizer", "scheduler"
Wants = Callable[[str], bool]
"""Whether names that begin with a label are wanted: files of others are not read."""


@dataclass(kw_only=True)
class Taken:
    """What a framework's checkpoint holds.

    Attributes:
        state: Tensors and values by flattened key.
        values: Values as a Checkpointer records them, by its name; of schedulers, generators and other whole objects.
        step: Optimizer steps done; None where it does not say.
        omitted: What is there and not taken, with the reason.
    """

    state: StateDict = field(default_factory=StateDict)
    values: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    omitted: list[str] = field(default_factory=list)

    def add(self, label: str, nested: Mapping[str, Any], path: Path) -> None:
        """Add the flat state dict of a model, or that of an optimizer with names, under its track name."""
        from flashckpt.interop import torch_files

        self.join(torch_files.flattened({label: nested}, path))

    def join(self, other: StateDict) -> None:
        """Add what was read elsewhere."""
        self.state.tensors += other.tensors
        self.state.values |= other.values
        self.state.paths |= other.paths

    def add_whole(self, name: str, value: Any) -> None:
        """Add an object with load_state_dict: its state is one value, whose empty members count too."""
        self.state.values[name] = value
        self.state.paths[name] = (name,)
        self.values[name] = pytree.flatten(value, name)[0]

    def add_schedulers(self, states: Sequence[Any]) -> None:
        """Add learning-rate schedulers: one as `scheduler`, several as `track(scheduler=[...])` names them."""
        for number, state in enumerate(states):
            self.add_whole(SCHEDULER if len(states) == 1 else f"{SCHEDULER}-{number}", state)

    def add_optimizer(
        self,
        state_dict: Any,
        path: Path,
        *,
        ordered: Mapping[str, tuple[int, ...]] | None,
        parameters: Sequence[str] | None,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Add an optimizer's state dict, with names in place of numbers.

        Args:
            state_dict: As `optimizer.state_dict()` gives it.
            path: Where it was read.
            ordered: Shapes of the model's tensors in the order of its modules; None where that order is unknown.
            parameters: Names in the optimizer's order, if the user gave them.
            shapes: Shapes of the model's tensors.

        Raises:
            ConfigError: The names are unknown, or those given do not fit.
        """
        groups = [group["params"] for group in state_dict["param_groups"]]
        held = {number: _shape_of(own) for number, own in state_dict["state"].items()}
        known = {number: shape for number, shape in held.items() if shape is not None}
        if parameters is not None:
            names: Mapping[int, str] | None = optimizer_names.as_given(groups, known, parameters, shapes)
        else:
            names = optimizer_names.as_recorded(state_dict["param_groups"], known, shapes)
            if names is None and ordered is not None:
                names = optimizer_names.by_order(groups, known, ordered)
        if names is None:
            raise optimizer_names.refuse_numbers(path, sum(map(len, groups)))
        self.add(OPTIMIZER, optimizer_names.named(state_dict, names), path)


def _shape_of(own: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of the parameter that a state belongs to: the one that its tensors have; None where none says."""
    shapes = {tuple(value.shape) for value in own.values() if isinstance(value, torch.Tensor) and value.dim()}
    return shapes.pop() if len(shapes) == 1 else None


def shapes_of(state: StateDict) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of the model, in the order in which they were read."""
    return {
        row.shard.fqn.removeprefix(f"{MODEL}."): row.shard.global_shape
        for row in state.tensors
        if row.shard.fqn.startswith(f"{MODEL}.")
    }
