"""The live display as lines of text: a bar, the figures, the newest events. No terminal, no thread; needs rich."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.watch.engine import Event
from flashckpt.trainer.watch.figures import Figures, duration

FIXED_LINES = 4
"""Lines without events: the bar and three of figures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """All that the display shows."""

    record: StepRecord | None
    figures: Figures | None
    steps: int
    left_s: float
    events: Sequence[Event]


class _Page(io.StringIO):
    """Where rich renders to: text in the terminal's encoding, which decides how a bar is drawn."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._name = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute there
        return self._name


def render(view: View, *, width: int, height: int, encoding: str = "utf-8") -> list[str]:
    """Return the display's lines, each narrower than `width` columns; fewer events where it would be too high."""
    page = _Page(encoding)
    console = Console(file=page, width=max(10, width - 1), force_terminal=True, legacy_windows=False, highlight=False)
    events = list(view.events)[-max(0, height - FIXED_LINES - 3) :] if height > FIXED_LINES + 3 else []
    console.print(Group(_bar(view), *_figures(view), *(_event(event) for event in events)))
    return page.getvalue().splitlines()[: max(1, height - 2)]


def _bar(view: View) -> RenderableType:
    done = view.record.step if view.record else 0
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    left = f"eta {duration(view.left_s)}" if view.record else "the first step is under way"
    row.add_row(
        Text(f"step {done}/{view.steps}", style="bold"),
        ProgressBar(total=view.steps, completed=done),
        Text(f"{done / view.steps:.0%}  {left}"),
    )
    return row


def _figures(view: View) -> list[Text]:
    record, figures = view.record, view.figures
    if record is None or figures is None:
        return [Text(""), Text(""), Text("")]
    lag = "" if figures.lag is None else f" ({figures.lag} behind)"
    persisted = "?" if figures.committed is None else figures.committed or "none"
    rows = (
        (
            ("loss", f"{record.loss:.4f}" + ("  skipped" if record.skipped else "")),
            ("rate", f"{record.rate:.2e}"),
            ("norm", f"{record.norm:.2f}"),
            ("tok/s", f"{figures.tokens_per_s:,.0f}"),
            *([] if figures.mfu is None else [("mfu", f"{figures.mfu:.1%}")]),
        ),
        (
            *([] if figures.device_gib is None else [("device", f"{figures.device_gib:.2f} GiB")]),
            *([] if figures.host_gib is None else [("host", f"{figures.host_gib:.2f} GiB")]),
            *((name, f"{value:.4f}") for name, value in record.channels.items()),
        ),
        (
            ("snapshot", f"{figures.snapshot or 'none'} (held {record.stall_ms:.1f} ms)"),
            ("checkpoint", f"{persisted}{lag}"),
            ("restarts", str(figures.restarts)),
        ),
    )
    return [_pairs(row) for row in rows]


def _pairs(row: Sequence[tuple[str, str]]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for number, (name, value) in enumerate(row):
        text.append(f"{'   ' if number else ''}{name} ", style="dim").append(value)
    return text


def _event(event: Event) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(time.strftime("%H:%M:%S", time.localtime(event.time_s)), style="dim")
    return text.append(f"  step {event.step}: {event.text}")
