"""From recorded terminal output to frames: what the screen showed, and when. Pure; pyte reads the escape sequences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyte


@dataclass(frozen=True, slots=True)
class StyledRun:
    """Neighbouring cells of one style: first column, cells it covers, text, colour ("default", a name or six hex digits)."""

    column: int
    cells: int
    text: str
    colour: str = "default"
    is_bold: bool = False


Row = tuple[StyledRun, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """What a screen showed from `at_s` on, row by row."""

    at_s: float
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Pacing:
    """How a recording is played: `speed` times as fast, and no pause longer than `longest_pause_s` of the recording."""

    speed: float = 1.0
    longest_pause_s: float = float("inf")


def frames_of(events: Iterable[tuple[float, str]], columns: int, rows: int, every_s: float = 0.25) -> list[Frame]:
    """Return the frames of a recording; changes less than `every_s` apart are one frame, and the last state is always one."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.Stream(screen)
    frames: list[Frame] = []
    pending: float | None = None
    begun = 0.0
    for at_s, text in events:
        if pending is not None and at_s - begun >= every_s:
            _append(frames, Frame(pending, _shown(screen)))
            pending = None
        if pending is None:
            begun = at_s
        stream.feed(text)
        pending = at_s
    if pending is not None:
        _append(frames, Frame(pending, _shown(screen)))
    return frames


def _append(frames: list[Frame], frame: Frame) -> None:
    if not frames or frames[-1].rows != frame.rows:
        frames.append(frame)


def _shown(screen: pyte.Screen) -> tuple[Row, ...]:
    return tuple(
        _row([screen.buffer[number][column] for column in range(screen.columns)]) for number in range(screen.lines)
    )


def _row(cells: Sequence[pyte.screens.Char]) -> Row:
    """Return the runs of a row, without blank ones; the second cell of a wide character has no text."""
    runs: list[StyledRun] = []
    for column, cell in enumerate(cells):
        colour, is_bold = ("default", False) if cell.data == " " else (cell.fg, cell.bold)
        last = runs[-1] if runs else None
        if last and (cell.data == "" or (last.colour, last.is_bold) == (colour, is_bold)):
            runs[-1] = StyledRun(last.column, last.cells + 1, last.text + cell.data, last.colour, last.is_bold)
        else:
            runs.append(StyledRun(column, 1, cell.data, colour, is_bold))
    return tuple(part for run in runs for part in _words(run))


def _words(run: StyledRun) -> list[StyledRun]:
    """Return a run without its gaps: what is two blanks apart is placed apart, for not every viewer keeps them."""
    if run.cells != len(run.text):  # with wide characters a place in the text is no column
        return [run] if run.text.strip() else []
    found = re.finditer(r"\S+(?: \S+)*", run.text)
    return [StyledRun(run.column + m.start(), len(m[0]), m[0], run.colour, run.is_bold) for m in found]


def paced(frames: Sequence[Frame], pacing: Pacing) -> tuple[list[Frame], int]:
    """Return the frames at the times at which they are played, the first at 0, and how many pauses were shortened."""
    played: list[Frame] = []
    shortened, now_s = 0, 0.0
    for number, frame in enumerate(frames):
        if number:
            pause_s = frame.at_s - frames[number - 1].at_s
            shortened += pause_s > pacing.longest_pause_s
            now_s += min(pause_s, pacing.longest_pause_s) / pacing.speed
        played.append(Frame(now_s, frame.rows))
    return played, shortened
