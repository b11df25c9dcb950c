"""`flashckpt examples`: the example programs and configurations that travel with the package, listed and written out."""

from __future__ import annotations

import ast
import difflib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Group

from flashckpt.cli.common import Command, json_option, new_table, show
from flashckpt.errors import ConfigError
from flashckpt.faults import crash_point
from flashckpt.printable import printable

FOLDERS = {"examples": "*.py", "configs": "*.toml"}
"""Folders beside this package's modules, by links in a checkout and as copies in a wheel, and what is taken from each."""
_COMMAND_LINES = re.compile(r"^# {2,}", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Example:
    """One file that can be written out: where it is installed, and what it is called below the reader's folder."""

    source: Path
    path: str

    @property
    def data(self) -> bytes:
        return self.source.read_bytes()

    def is_called(self, name: str) -> bool:
        return name in {self.path, self.source.name}


@click.command(cls=Command)
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--to",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write below DIR, all of them where none is named.  [default: this directory]",
)
@json_option
def examples(*, names: tuple[str, ...], folder: Path | None, as_json: bool) -> None:
    """List the example programs and configurations of this release, or write those named.

    They are written as examples/NAME and configs/NAME, so that the commands in their first lines work from
    there as they stand. A file that differs is never overwritten.

    Examples:
      flashckpt examples
      flashckpt examples first_loop.py
      flashckpt examples 3d.toml tiny.toml --to try
    """
    there = _installed()
    if not names and folder is None:
        rows = [{"name": one.path, "about": about(one.data.decode(), one.source.suffix)} for one in there]
        show({"examples": rows}, as_json=as_json, table=lambda: _list(rows))
        return
    wanted = [_named(name, there) for name in names] or there
    written, unchanged = _write(wanted, folder or Path())
    lines = [*(f"{path} is written" for path in written), *(f"{path} is there already, equal" for path in unchanged)]
    show({"written": written, "unchanged": unchanged}, as_json=as_json, table=lambda: "\n".join(map(printable, lines)))


def about(text: str, suffix: str) -> str:
    """Return the first sentence of a program's docstring or of a configuration's first comment."""
    if suffix == ".py":
        head = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    else:
        above = _COMMAND_LINES.split(f"\n{text}".partition("\n[")[0])[0]
        head = above.replace("\n# ", "\n")
    sentence = re.match(r".+?(?=\.\s|[.:]?\s*$)", " ".join(head.split()))
    return sentence[0] if sentence else ""


def _installed() -> list[_Example]:
    package = Path(__file__).parents[1]
    found = [
        _Example(source, f"{folder}/{source.name}")
        for folder, pattern in FOLDERS.items()
        for source in sorted((package / folder).glob(pattern))
    ]
    if not found:
        raise ConfigError(
            "this installation has no examples",
            found=f"no files in {package}/examples",
            expected="the files of the wheel, or links in a checkout",
            remedy="install the package again; a checkout needs git config core.symlinks true",
        )
    return found


def _named(name: str, there: list[_Example]) -> _Example:
    for one in there:
        if one.is_called(name):
            return one
    known = [one.source.name for one in there]
    near = difflib.get_close_matches(name, known, 1)
    raise ConfigError(
        "there is no example of that name",
        found=name,
        expected=f"{near[0]}, perhaps" if near else ", ".join(known),
        state="Nothing was written.",
        remedy="flashckpt examples lists them",
    )


def _write(wanted: list[_Example], folder: Path) -> tuple[list[str], list[str]]:
    """Write what is not there yet; return the paths written, and those that held the same bytes already.

    Raises:
        ConfigError: There is another file of one of the names. Where that can be seen in advance, nothing is written.
    """
    targets = {folder / one.path: one.data for one in wanted}
    for path, data in targets.items():
        _holds(path, data, written=[])
    written: list[str] = []
    for path, data in targets.items():
        while not _holds(path, data, written=written):
            if _create(path, data):
                written.append(str(path))
    return written, [str(path) for path in targets if str(path) not in written]


def _holds(path: Path, data: bytes, *, written: list[str]) -> bool:
    """Tell whether `path` holds these bytes; False where nothing has that name.

    Raises:
        ConfigError: It holds something else.
    """
    if not os.path.lexists(path):
        return False
    if path.is_file() and path.read_bytes() == data:
        return True
    raise ConfigError(
        f"{path} is there already and differs from the example",
        state="It was left unchanged. " + (f"Written: {', '.join(written)}." if written else "Nothing was written."),
        remedy="choose another folder with --to DIR, or move it away",
    )


def _create(path: Path, data: bytes) -> bool:
    """Write a file in one step that never overwrites; False where the name was taken meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        crash_point("examples.before-link")
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _list(rows: list[dict[str, str]]) -> Group:
    table = new_table("NAME", "ABOUT")
    for row in rows:
        table.add_row(row["name"], row["about"])
    return Group(table, "flashckpt examples NAME writes one below this directory, or below DIR with --to DIR")
