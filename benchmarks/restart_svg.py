"""From one record of dlrun's ledger to a timeline: the seconds from SIGKILL to the end of the next step. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from demo_svg import LINE, MARGIN, base_style

from flashckpt.printable import printable

PHASES = {
    "detect": "noticed", "stop": "other ranks ended", "rendezvous": "new generation agreed", "fork": "forked from the zygote",
    "init": "process group, model, mesh", "restore": "restored from memory", "first_step": "next step trained",
}  # fmt: skip
WIDTH, NAMES, FIGURES = 860, 215, 75  # pixels: all, names on the left, seconds on the right
COLOURS = ("#8250df", "#bf3989", "#bc4c00", "#9a6700", "#1a7f37", "#0969da", "#1b7c83")


def phases_of(record: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Return (name, begin, seconds) of each phase that a record has.

    Raises:
        ValueError: The record says nothing about the next step: the restart had not ended.
    """
    seconds = record.get("seconds", {})
    if "first_step" not in seconds:
        raise ValueError(
            f"the restart after the failure of rank {record.get('rank', '?')} has no next step in the ledger"
        )
    phases, begin = [], 0.0
    for name, text in PHASES.items():
        if name in seconds:
            phases.append((text, begin, float(seconds[name])))
            begin += float(seconds[name])
    return phases


def timeline_svg(record: Mapping[str, Any], title: str, notes: Sequence[str]) -> str:
    """Return the picture: one bar per phase, each where the one before it ends."""
    phases = phases_of(record)
    sum_s = phases[-1][1] + phases[-1][2]
    total_s = float(record.get("total_s", sum_s))
    scale = (WIDTH - 2 * MARGIN - NAMES - FIGURES) / max(sum_s, total_s, 1e-9)
    top, pitch = MARGIN + 2 * LINE, LINE + 9
    bars = []
    for number, ((name, begin, seconds), colour) in enumerate(zip(phases, COLOURS, strict=False)):
        x, y, width = MARGIN + NAMES + begin * scale, top + number * pitch, max(seconds * scale, 1.0)
        bars.append(
            _text(MARGIN, y + LINE - 3, name)
            + f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LINE}" rx="2" fill="{colour}"/>'
            + _text(x + width + 6, y + LINE - 3, f"{seconds:.3f} s")
        )
    below = top + len(phases) * pitch
    axis = "".join(
        f'<line class="l" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 5}" y2="{below}" stroke-dasharray="2 3"/>'
        for x in (MARGIN + NAMES, MARGIN + NAMES + total_s * scale)
    )
    foot = _text(
        MARGIN,
        below + LINE,
        f"in all {total_s:.3f} s (each phase is that of its slowest rank: they overlap)",
        bold=True,
    )
    foot += "".join(_text(MARGIN, below + (2 + n) * LINE, note, css="n") for n, note in enumerate(notes))
    height = below + (2 + len(notes)) * LINE + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
        f"<title>{escape(printable(title))}</title><style>{base_style()}</style>"
        f'<rect class="b" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
        f"{_text(MARGIN, MARGIN + LINE - 3, title, bold=True)}{axis}{''.join(bars)}{foot}</svg>\n"
    )


def _text(x: float, y: float, text: str, *, css: str = "", bold: bool = False) -> str:
    style = (f' class="{css}"' if css else "") + (' font-weight="bold"' if bold else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{escape(printable(text))}</text>'
