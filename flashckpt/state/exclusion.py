"""Which state of tracked modules no snapshot holds, since the user asked for it: `track(exclude=)`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

import torch

from flashckpt.errors import ConfigError

_WILD = frozenset("*?[")


class Exclusion:
    """Patterns over the names of module state.

    A pattern matches a name with or without its track name: "base.*" and "model.base.*" are the same where the module
    is tracked as `model`.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._patterns: list[str] = []
        self._known: dict[str, bool] = {}

    def add(self, patterns: str | Iterable[str]) -> None:
        """Add patterns; a name without `*`, `?` and `[` stands for itself, and there may be many.

        Raises:
            ConfigError: One is not a text, or is empty.
        """
        more = [patterns] if isinstance(patterns, str) else list(patterns)
        for one in more:
            if not isinstance(one, str) or not one:
                raise ConfigError(
                    "exclude= is not a pattern over names",
                    found=repr(one),
                    expected='a text as "base.*", or a list of them',
                    state="Nothing was tracked.",
                )
        self._names.update(one for one in more if not _WILD & set(one))
        self._patterns += [one for one in more if _WILD & set(one)]
        self._known = {}

    def __bool__(self) -> bool:
        return bool(self._names or self._patterns)

    def __call__(self, name: str) -> bool:
        """Whether a name, with its track name, is left out."""
        if not self:
            return False
        if (known := self._known.get(name)) is None:
            both = {name, _short(name)}
            known = self._known[name] = not both.isdisjoint(self._names) or any(
                fnmatch.fnmatchcase(one, pattern) for pattern in self._patterns for one in both
            )
        return known

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that match none of the names."""
        known = {one for name in names for one in (name, _short(name))}
        patterns = (p for p in self._patterns if not any(fnmatch.fnmatchcase(one, p) for one in known))
        return [*sorted(self._names - known), *patterns]


def _short(name: str) -> str:
    return name.partition(".")[2]


def refuse_trained(name: str, tensor: torch.Tensor) -> None:
    """Refuse to leave out what training changes.

    Raises:
        ConfigError: The tensor takes gradients.
    """
    if tensor.requires_grad:
        raise ConfigError(
            f"{name!r} is left out by exclude= and is trained",
            found="requires_grad is true: a restart would begin with the weights of before training",
            expected="frozen parameters and constant buffers",
            state="No snapshot was taken of it.",
            remedy="call requires_grad_(False) on it before track(), or narrow the pattern",
        )
