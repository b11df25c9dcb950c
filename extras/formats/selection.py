"""Which names are taken and what they are called on the other side. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass

from flashckpt.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What `--only`, `--strip` and `--rename` say.

    Attributes:
        only: Patterns over names (`model.*`); () takes everything.
        renames: (old beginning, new beginning), the first that fits a name is used; ("", "model.") puts
            `model.` in front.
    """

    only: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()

    def takes(self, *names: str) -> bool:
        """Return whether a thing is taken that goes by any of these names."""
        return not self.only or any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.only)

    def may_take(self, label: str) -> bool:
        """Return whether names that begin with this label may be taken: whether its file has to be read at all."""
        heads = [re.split(r"[.*?[]", pattern, maxsplit=1)[0] for pattern in self.only]
        exact = [
            pattern[len(head) : len(head) + 1] in ("", ".") for pattern, head in zip(self.only, heads, strict=True)
        ]
        return not self.only or any(
            label == head if whole else label.startswith(head) for head, whole in zip(heads, exact, strict=True)
        )

    def rename(self, name: str) -> str:
        """Return the name on the other side."""
        for old, new in self.renames:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name


def parse_selection(only: Iterable[str], strip: Iterable[str], rename: Iterable[str]) -> Selection:
    """Return the Selection of a command line; ConfigError names a rename without "="."""
    if bad := [one for one in rename if "=" not in one]:
        raise ConfigError("--rename cannot be read", found=bad[0], expected="OLD=NEW, e.g. model.=transformer.")
    pairs = [(old, new) for old, _, new in (one.partition("=") for one in rename)]
    return Selection(only=tuple(only), renames=(*((prefix, "") for prefix in strip), *pairs))


def refuse_clashes(pairs: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError where two of (name, new name) get one new name, or a name becomes empty."""
    seen: dict[str, str] = {}
    for name, new in pairs:
        if not new or new in seen:
            raise ConfigError(
                f"the name {name!r} would become {new!r}"
                + (f", as {seen[new]!r} does" if new else ", which is no name"),
                state="Nothing was written.",
                remedy="choose fewer names with --only, or change --strip and --rename",
            )
        seen[new] = name


def refuse_nothing(found: int, selection: Selection, names: Iterable[str]) -> None:
    """Raise ConfigError where no name was taken; shows some that there are."""
    if found:
        return
    there = sorted(names)
    raise ConfigError(
        "no tensor matches" if selection.only else "there is no tensor in it",
        found="--only " + " ".join(selection.only) if selection.only else "",
        expected="a pattern of names such as " + ", ".join(there[:5]) if there else "",
        state="Nothing was written.",
    )
