"""`flashckpt bench` run in this process, as its command line runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from flashckpt.bench import measure
from flashckpt.bench.command import bench


def run(*arguments: str) -> Result:
    """Return what the command ended with."""
    return CliRunner().invoke(bench, list(arguments))


def result_of(path: Path, *arguments: str) -> dict[str, Any]:
    """Return the document that a run without an error wrote to `path`."""
    result = run(*arguments, "--json", str(path))
    assert result.exit_code == 0, (result.output, result.exception)
    return measure.read_json(path)


def left(*places: Path) -> list[str]:
    """Return what lies in some folders."""
    return [str(p) for place in places for p in place.rglob("*")]
