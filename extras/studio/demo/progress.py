"""The demo's live line: one line that moves on a terminal, a line now and then everywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

EVERY = 10


class Progress:
    """Shows the progress of a run."""

    def __init__(self, console: Console, *, steps: int, name: str) -> None:
        self._console, self._steps, self._name = console, steps, name
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._printed = 0

    def __enter__(self) -> Progress:  # noqa: PYI034 -- typing.Self needs Python 3.11
        if self._console.is_terminal:
            columns = (
                TextColumn("  {task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"), TimeElapsedColumn(),
            )  # fmt: skip
            self._bar = Bar(*columns, console=self._console, transient=False)
            self._task = self._bar.add_task(self._name, total=self._steps, text="starting")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, trace: Sequence[Mapping[str, Any]]) -> None:
        """Show the newest step of a trace."""
        if not trace:
            return
        step, loss = int(trace[-1]["step"]), float.fromhex(trace[-1]["loss"])
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=f"loss {loss:.4f}")
        elif step // EVERY != self._printed // EVERY:
            self._console.print(f"  step {step}/{self._steps}  loss {loss:.4f}")
        self._printed = step

    def note(self, text: str) -> None:
        """Print an event without disturbing the live line."""
        self._console.print(f"  [yellow]{text}[/yellow]")
