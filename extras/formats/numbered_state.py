"""State dicts as loops save them: optimizers that number their parameters, names with wrappers, members of other names.

`optimizer.state_dict()` and what DDP and `torch.compile` put into names are recognised wherever they lie. What they become
is what `track(model=, optimizer=)` of the bare model says; numbers that no name is certain for are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flashckpt.dcp.names import GROUPS, STATE
from flashckpt.dcp.names import Path as StatePath
from flashckpt.errors import ConfigError
from flashckpt.interop import optimizer_names
from flashckpt.interop.framework_state import MODEL, OPTIMIZER, SCHEDULER
from flashckpt.interop.optimizer_names import Shape
from flashckpt.interop.selection import Selection
from flashckpt.interop.state_dicts import StateDict
from flashckpt.state import modules

_USUAL = {
    MODEL: ("state_dict", "model_state_dict", "model_state", "model_dict"),
    OPTIMIZER: ("optimizer_state_dict", "optimizer_state", "optimizer_dict", "optim"),
    SCHEDULER: ("scheduler_state_dict", "lr_scheduler", "lr_scheduler_state_dict"),
}
"""Track name -> what loops call that member of their file."""
_DDP = "module."


class Renaming:
    """The names that things of a state dict get: the user's, else those of the tracked objects, without wrappers.

    Args:
        selection: What the user says.
        is_plain: Nothing is known of what saved it: names may begin with DDP's `module.`, members may have any name.

    Attributes:
        labels: Member of the file -> track name, where it has another one and each track name is meant once.
    """

    def __init__(self, selection: Selection, state: StateDict, *, is_plain: bool) -> None:
        self._selection, self._heads, self.labels = selection, list[str](), dict[str, str]()
        if not is_plain:
            return
        tops = {str(path[0]) for path in state.paths.values() if len(path) > 1}
        for label, others in _USUAL.items():
            known = sorted(tops.intersection(others))
            if label not in tops and len(known) == 1:
                self.labels[known[0]] = label
        below: dict[str, list[str]] = {}
        for row in state.tensors:
            *place, leaf = state.paths.get(row.shard.fqn, (row.shard.fqn,))
            below.setdefault("".join(f"{part}." for part in place), []).append(modules.strip(str(leaf)))
        groups = [names for key, names in state.values.items() if key.endswith(".params") and isinstance(names, list)]
        named = [str(name) for names in groups for name in names]
        if not any(name.startswith(_DDP) for name in named):  # torch's own names of an optimizer have no wrappers
            self._heads = [head for head, own in below.items() if all(name.startswith(_DDP) for name in own)]

    def bare(self, name: str) -> str:
        """Return a name without wrappers."""
        name = modules.strip(name)
        head = next((head for head in self._heads if name.startswith(head + _DDP)), None)
        return name if head is None else head + name[len(head) + len(_DDP) :]

    def __call__(self, name: str) -> str:
        """Return the new name."""
        bare, renames = self.bare(name), self._selection.renames
        if any(name.startswith(old) and not bare.startswith(old) for old, _ in renames):  # it names the wrapper
            return modules.strip(self._selection.rename(name))
        if any(bare.startswith(old) for old, _ in renames):
            return self._selection.rename(bare)
        top, dot, rest = bare.partition(".")
        return f"{self.labels[top]}.{rest}" if dot and top in self.labels else bare


def named(
    state: StateDict, new: Renaming, takes: Callable[[str], bool], parameters: Sequence[str] | None, path: Path
) -> StateDict:
    """Return a state dict with names in place of the numbers of its optimizers.

    What nobody `takes` needs no names.

    Raises:
        ConfigError: No name is certain, or those given do not fit.
    """
    found = {place: one for place, one in _numbered(state).items() if any(map(takes, one.keys))}
    if not found and parameters is not None:
        raise ConfigError(
            "--parameters is of no use here",
            found=f"nothing in {path} numbers the parameters of an optimizer",
            expected="optimizer.state_dict(), as torch gives it",
            state="Nothing was imported.",
        )
    models = _models(state, found, new)
    for place, one in found.items():
        if len(place) != 1:
            raise ConfigError(
                f"{path} holds the state of an optimizer where none can be tracked",
                found="at " + "".join(f"[{part!r}]" for part in place) if place else "it is the whole file",
                expected='one member of the file beside its model, such as {"model": ..., "optimizer": ...}',
                state="Nothing was imported.",
                remedy="save it so where it was written, or take the rest alone: --only 'model.*'",
            )
        names = _names_of(one, models, parameters, is_alone=len(found) == 1)
        if names is None:
            raise optimizer_names.refuse_numbers(f"{place[0]!r} in {path}", sum(map(len, one.groups)))
        state = _with_names(state, place, one, names)
    return state


@dataclass(kw_only=True)
class _Numbered:
    """An optimizer's state dict in a flattened one."""

    groups: list[list[int]] = field(default_factory=list)
    recorded: list[list[str]] = field(default_factory=list)
    shapes: dict[int, Shape] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)


def _numbered(state: StateDict) -> dict[StatePath, _Numbered]:
    """Return the optimizers that number their parameters, by their place."""
    found: dict[StatePath, _Numbered] = {}
    for key, value in state.values.items():
        path = state.paths.get(key, (key,))
        is_params = len(path) > 2 and path[-3] == GROUPS and path[-1] == "params" and isinstance(value, list)
        if is_params and value and all(type(number) is int for number in value):
            one = found.setdefault(path[:-3], _Numbered())
            one.groups.append(value)
            other = state.values.get(key.removesuffix("params") + "param_names")
            one.recorded.append([modules.strip(str(name)) for name in other] if isinstance(other, list) else [])
    if not found:
        return found
    shapes: dict[StatePath, set[Shape]] = {}
    boxes = {row.shard.fqn: row.shard.global_shape for row in state.tensors}
    for key in [*boxes, *state.values]:
        path = state.paths.get(key, (key,))
        for place in [path[:end] for end in range(len(path)) if path[:end] in found]:
            found[place].keys.append(key)
            if len(path) == len(place) + 3 and path[len(place)] == STATE and boxes.get(key):
                shapes.setdefault(path[:-1], set()).add(boxes[key])
    for place, one in found.items():
        for number in [number for numbers in one.groups for number in numbers]:
            own = shapes.get((*place, STATE, str(number)), shapes.get((*place, STATE, number), set()))
            if len(own) == 1:
                one.shapes[number] = next(iter(own))
    return found


@dataclass(kw_only=True)
class _Model:
    """Tensors of one member of a file, in its order.

    Attributes:
        shapes: By their name in it.
        short: Name in it -> name inside the names of optimizer state.
        is_usual: It will be tracked as `model`.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    short: dict[str, str] = field(default_factory=dict)
    is_usual: bool = False


def _models(state: StateDict, optimizers: Iterable[StatePath], new: Renaming) -> list[_Model]:
    """Return the members that may be models; where there are several, the last one is all of them."""
    boxes = {row.shard.fqn: row.shard.global_shape for row in state.tensors}
    known = tuple(optimizers)
    models: dict[StatePath, _Model] = {}
    whole = _Model()
    for key in [*state.paths, *(key for key in boxes if key not in state.paths)]:
        path = state.paths.get(key, (key,))
        if key not in boxes or key in state.doubles or any(path[: len(place)] == place for place in known):
            continue
        name = new(key)
        one = models.setdefault(path[:-1], _Model(is_usual=name.startswith(f"{MODEL}.")))
        own = new.bare(key)[len("".join(f"{part}." for part in path[:-1])) :]
        for model, called in ((one, own), (whole, name.removeprefix(f"{MODEL}."))):
            model.shapes[called], model.short[called] = boxes[key], name.removeprefix(f"{MODEL}.")
    return [*models.values(), *([whole] if len(models) != 1 else [])]


def _names_of(
    one: _Numbered, models: Sequence[_Model], parameters: Sequence[str] | None, *, is_alone: bool
) -> Mapping[int, str] | None:
    """Return number -> name; None where no name is certain."""
    if parameters is not None:
        given = [modules.strip(name) for name in parameters]
        fits = [model for model in models if model.shapes.keys() >= set(given)] or models[-1:]
        best = next((model for model in fits if model.is_usual), fits[0] if fits else _Model())
        if not best.shapes.keys() >= set(given):
            given = [name.removeprefix(_DDP) for name in given]
        named = optimizer_names.as_given(one.groups, one.shapes, given, best.shapes)
        return {number: best.short[name] for number, name in named.items()}
    columns = list(zip(one.groups, one.recorded, strict=True))
    pairs = [{"params": own, "param_names": names} for own, names in columns]
    bare = [{"params": own, "param_names": [name.removeprefix(_DDP) for name in names]} for own, names in columns]
    ways: list[Callable[[_Model], dict[int, str] | None]] = [
        lambda model: optimizer_names.as_recorded(pairs, one.shapes, model.shapes),
        lambda model: optimizer_names.as_recorded(bare, one.shapes, model.shapes),
        lambda model: optimizer_names.by_order(one.groups, one.shapes, model.shapes),
    ]
    singles, rest = (models[:-1], models[-1:]) if len(models) > 1 else (models, [])
    for way, some in [(way, some) for some in (singles, rest) for way in ways]:
        found = [(model, names) for model in some if (names := way(model)) is not None]
        found = [pair for pair in found if pair[0].is_usual] if len(found) > 1 and is_alone else found
        if found:
            (model, names), *others = found
            return None if others else {number: model.short[name] for number, name in names.items()}
    return None


def _with_names(state: StateDict, place: StatePath, one: _Numbered, names: Mapping[int, str]) -> StateDict:
    """Return the state dict with one optimizer's numbers replaced."""
    by_text = {str(number): name for number, name in names.items()}
    at, keys, paths, values = len(place), dict[str, str](), dict(state.paths), dict(state.values)
    for key in one.keys:
        path = paths.pop(key, (key,))
        if path[at] == STATE and len(path) > at + 1:
            path = (*place, STATE, by_text.get(str(path[at + 1]), str(path[at + 1])), *path[at + 2 :])
        keys[key] = ".".join(map(str, path))
        paths[keys[key]] = path
        if key in values:
            value = values.pop(key)
            if path[-3:-2] == (GROUPS,) and path[-1] == "param_names":
                del paths[keys[key]]
                continue
            if path[-3:-2] == (GROUPS,) and path[-1] == "params":
                value = [names[number] for number in value]
            values[keys[key]] = value
    rows = [replace(row, shard=replace(row.shard, fqn=keys.get(row.shard.fqn, row.shard.fqn))) for row in state.tensors]
    return replace(state, tensors=rows, values=values, paths=paths)
