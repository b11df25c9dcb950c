"""The entry points that the core finds what is beside it by: those of flashckpt's own extras/, and of any installed package."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flashckpt.environment import env
from flashckpt.errors import ConfigError

STORES, COMMANDS, FORMATS, TRAINER, PERSISTER, HOOKS, PRELOAD, EXTRAS = (
    f"flashckpt.{name}"
    for name in ("stores", "commands", "formats", "trainer", "persister", "hooks", "preload", "extras")
)
"""The groups."""
OURS = "flashckpt"
"""Name of the distribution that the core and extras/ are in."""


class EntryPoint(NamedTuple):
    """An entry point.

    Attributes:
        name: By which it is asked for.
        target: "module:object", or a module alone.
        package: Distribution that declares it.
    """

    name: str
    target: str
    package: str = OURS

    def load(self) -> Any:
        """Return the object.

        Raises:
            ConfigError: It cannot be imported.
        """
        module, _, path = self.target.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for name in filter(None, path.split(".")):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
            if not is_missing and self.package == OURS:
                raise  # a library that it needs: whoever asks for it says which
            raise ConfigError(
                f"{self.name} of the package {self.package} {'is not installed' if is_missing else 'cannot be loaded'}",
                found=f"{type(error).__name__}: {error}",
                expected=self.target,
                remedy=f"pip install --force-reinstall {self.package}",
            ) from error
        return found

    def load_if_installed(self) -> Any:
        """Return the object; None for one of ours whose room of extras/ is not installed. Raises as `load`."""
        try:
            return self.load()
        except ConfigError:
            if self.package == OURS:
                return None
            raise


def find(group: str, name: str) -> EntryPoint | None:
    """Return the entry point of a name; the metadata of other packages is read only where flashckpt has none."""
    return _own().get(group, {}).get(name) or others(group).get(name)


def every(group: str) -> Sequence[EntryPoint]:
    """Return all entry points of a group: those of flashckpt as they are declared, then others by name."""
    own, more = _own().get(group, {}), others(group)
    return [*own.values(), *(more[name] for name in sorted(more.keys() - own.keys()))]


def load(group: str, name: str) -> Any:
    """Return the object of a name.

    Raises:
        ConfigError: No installed package has it, or it cannot be imported.
    """
    entry = find(group, name)
    if entry is None:
        raise ConfigError(
            f"{name} is not installed",
            found=f"no entry point {name} in {group}",
            expected="a package that declares it",
            remedy=f"pip install --force-reinstall {OURS}, or install the package that brings it",
        )
    return entry.load()


def optional(name: str) -> Any:
    """Return what extras/ has for a place of the core; None where that room is not installed."""
    entry = find(EXTRAS, name)
    return None if entry is None else entry.load_if_installed()


def refuse_wrong_tasks() -> None:
    """Read what is to be made of checkpoints beside training as its own process will, behind the first commit and out of sight.

    Raises:
        ConfigError: A command does not take its words.
    """
    if (commands := env.FLASHCKPT_AFTER_COMMIT) and (read := optional("after-commit-tasks")):
        read(commands)


def others(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group that packages other than flashckpt declare, by name."""
    return _others().get(group, {})


Groups = Mapping[str, Mapping[str, EntryPoint]]
"""By group and name."""


@functools.cache
def _own() -> Groups:
    """Return what flashckpt declares: of a checkout from pyproject.toml, which is never out of date."""
    project = _checkout(Path(__file__).absolute().parents[1] / "pyproject.toml")
    if project is None:
        return next(
            (groups for package, groups in _installed() if package == OURS), {}
        )  # the first on the path, as imports
    return {
        group: {name: EntryPoint(name, target) for name, target in found.items()}
        for group, found in project.get("entry-points", {}).items()
    }


def _checkout(path: Path) -> Mapping[str, Any] | None:
    """Return [project] of a pyproject.toml of ours; None where there is none: this is an installed wheel."""
    if not path.is_file():
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project: Mapping[str, Any] = tomllib.loads(path.read_text()).get("project", {})
    return project if project.get("name") == OURS else None


@functools.cache
def _others() -> Groups:
    """Return what other packages declare; of two with one name the first on the path."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for package, groups in _installed():
        for group, entries in groups.items() if package != OURS else ():
            found[group] = {**entries, **found.get(group, {})}
    return found


def _installed() -> Iterator[tuple[str, Groups]]:
    """Yield what each installed package declares for flashckpt, in the order of the path.

    As importlib.metadata finds it, which takes 25 ms to import and 30 ms to read all packages, at each `flashckpt --help`.
    """
    for folder in dict.fromkeys(sys.path):
        try:
            names = sorted(name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info")))  # noqa: PTH208 -- half the time
        except OSError:  # a zip file, or not there
            continue
        for name in names:
            try:
                with open(f"{folder or '.'}/{name}/entry_points.txt", "rb") as file:  # noqa: PTH123 -- as above
                    text = file.read()
            except OSError:
                continue
            if b"[flashckpt." in text:
                package = name.rpartition(".")[0].partition("-")[0].replace("_", "-")
                yield package, _parsed(text.decode(errors="replace"), package)


def _parsed(text: str, package: str) -> Groups:
    found: dict[str, dict[str, EntryPoint]] = {}
    entries: dict[str, EntryPoint] = {}
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            entries = found.setdefault(line.strip("[]"), {})
        elif "=" in line and not line.startswith("#"):
            name, _, target = (part.strip() for part in line.partition("="))
            entries[name] = EntryPoint(name, target.partition(" ")[0], package)
    return found
