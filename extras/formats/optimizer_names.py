"""Names for the numbers of an optimizer's state dict. Pure.

`optimizer.state_dict()` counts parameters in the order of the groups. Shapes say which name a number may have; a name
is only given where no other would fit, since two moments of one shape that change places would not be noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashckpt.errors import ConfigError

Shape = tuple[int, ...]
_NOT_PARAMETERS = ("running_mean", "running_var", "num_batches_tracked")


def by_order(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, Shape], ordered: Mapping[str, Shape]
) -> dict[int, str] | None:
    """Return number -> name, from the tensors of a model in its order; None where there is not exactly one way.

    Args:
        groups: Numbers of each group's parameters.
        shapes: Of the parameters, as far as their state shows them.
        ordered: Name -> shape of the model's tensors in the order of its modules; buffers may be among them.
    """
    known = {name: shape for name, shape in ordered.items() if name.rpartition(".")[2] not in _NOT_PARAMETERS}
    names: dict[int, str] = {}
    for numbers in groups:
        found = _only_way([shapes.get(number) for number in numbers], known)
        if found is None:
            return None
        names |= dict(zip(numbers, found, strict=True))
    return names if len(set(names.values())) == len(names) else None


def _only_way(wanted: Sequence[Shape | None], ordered: Mapping[str, Shape]) -> list[str] | None:
    """Return the one subsequence of names whose shapes are the wanted ones; None for none and for several."""
    names, shapes = list(ordered), list(ordered.values())
    spare = len(names) - len(wanted)
    if spare < 0:
        return None
    early = _leftmost(wanted, shapes)
    late = _leftmost(wanted[::-1], shapes[::-1])
    if early is None or late is None:
        return None
    # the first place that each can have is also the last one: there is one way
    if early != [len(names) - 1 - at for at in reversed(late)]:
        return None
    return [names[at] for at in early]


def _leftmost(wanted: Sequence[Shape | None], shapes: Sequence[Shape]) -> list[int] | None:
    places: list[int] = []
    at = 0
    for shape in wanted:
        while at < len(shapes) and shape is not None and shapes[at] != shape:
            at += 1
        if at >= len(shapes):
            return None
        places.append(at)
        at += 1
    return places


def as_recorded(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[int, Shape], known: Mapping[str, Shape]
) -> dict[int, str] | None:
    """Return number -> name where the groups say it: torch records `param_names` if it was given named parameters.

    None where they do not, or where the names are not those of the model's tensors.
    """
    pairs = [pair for group in groups for pair in zip(group["params"], group.get("param_names") or (), strict=False)]
    names = dict(pairs)
    if len(set(names.values())) != sum(len(group["params"]) for group in groups):
        return None
    fits = all(name in known and shapes.get(number, known[name]) == known[name] for number, name in pairs)
    return names if fits else None


def as_given(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, Shape], names: Sequence[str], known: Mapping[str, Shape]
) -> dict[int, str]:
    """Return number -> name by a list of names in the optimizer's order; ConfigError where it does not fit."""
    numbers = [number for group in groups for number in group]
    if len(numbers) != len(names) or len(set(names)) != len(names):
        raise ConfigError(
            "the names of --parameters are not those of this optimizer",
            found=f"{len(set(names))} names",
            expected=f"{len(numbers)} names, one line for each of its parameters",
            state="Nothing was imported.",
        )
    for number, name in zip(numbers, names, strict=True):
        if name not in known or shapes.get(number, known[name]) != known[name]:
            raise ConfigError(
                f"the name {name!r:.80} of --parameters does not fit parameter {number} of the optimizer",
                found=f"shape {list(known[name])}" if name in known else "no tensor of the model with this name",
                expected=f"shape {list(shapes[number])}" if number in shapes else "a tensor of the model",
                state="Nothing was imported.",
                remedy="write the names in the order of optimizer.param_groups (docs/interop.md)",
            )
    return dict(zip(numbers, names, strict=True))


def named(state_dict: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state dict with names in place of numbers."""
    groups = [
        {**group, "params": [names[number] for number in group["params"]]} for group in state_dict["param_groups"]
    ]
    for group in groups:
        group.pop("param_names", None)
    return {"state": {names[number]: own for number, own in state_dict["state"].items()}, "param_groups": groups}


def refuse_numbers(path: object, count: int) -> ConfigError:
    """Return the error for numbers that no name could be found for."""
    return ConfigError(
        f"the optimizer of {path} identifies parameters by number, and their names cannot be inferred",
        found=f"{count} parameters",
        expected="--parameters FILE with their names, one to a line, in the order of optimizer.param_groups",
        state="Nothing was imported.",
        remedy="write that file where the model is built (docs/interop.md), or take the model alone: --only 'model.*'",
    )
