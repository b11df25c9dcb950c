"""From frames to one animated SVG: CSS alone, no script, no font from elsewhere, light and dark. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

from demo_frames import Frame, Row, StyledRun

from flashckpt.printable import printable

CELL, LINE, MARGIN, SIZE = 7.8, 17, 14, 13  # pixels: width of a cell, height of a row, border, font
HOLD_S = 6.0
"""Seconds for which the last frame stays before the picture begins again."""
COLOURS = {
    "red": ("#b3261e", "#ff7b72"), "green": ("#116329", "#56d364"), "brown": ("#7d4e00", "#e3b341"),
    "blue": ("#0550ae", "#79c0ff"), "magenta": ("#8250df", "#d2a8ff"), "cyan": ("#1b6a72", "#76e3ea"),
}  # fmt: skip
"""What pyte calls a colour ("brown" is the terminal's yellow): on light and on dark ground."""
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
LIGHT, DARK = ("#ffffff", "#1f2328", "#59636e", "#d1d9e0"), ("#0d1117", "#e6edf3", "#9198a1", "#3d444d")
Span = tuple[float, float]


def base_style() -> str:
    """Return the colours that both pictures share: b, t, n and l for ground, text, notes and lines."""

    def rules(ground: Sequence[str], which: int) -> str:
        back, text, note, line = ground
        named = "".join(f".{name}{{fill:{pair[which]}}}" for name, pair in COLOURS.items())
        return f".b{{fill:{back};stroke:{line}}}text{{fill:{text}}}.n{{fill:{note}}}.l{{stroke:{note}}}{named}"

    return f"text{{font:{SIZE}px {FONT};white-space:pre}}{rules(LIGHT, 0)}@media(prefers-color-scheme:dark){{{rules(DARK, 1)}}}"


def animated_svg(frames: Sequence[Frame], columns: int, title: str, notes: Sequence[str]) -> str:
    """Return the picture; without animation (a viewer that has none, or less motion asked for) it shows the last frame."""
    end_s = frames[-1].at_s + HOLD_S
    height = max((number + 1 for frame in frames for number, row in enumerate(frame.rows) if row), default=1)
    below = 2 * MARGIN + height * LINE
    width, total = round(2 * MARGIN + columns * CELL), below + len(notes) * LINE
    rules, groups = [], []
    for number, (span, rows) in enumerate(sorted(spans_of(frames).items())):
        rules.append(_keyframes(number, span, end_s))
        drawn = "".join(_drawn(run, row) for row, runs in rows for run in runs)
        groups.append(f'<g class="f" id="g{number}">{drawn}</g>')
    motion = f"@media(prefers-reduced-motion:no-preference){{.f{{animation:{end_s:.2f}s step-end infinite}}}}"
    captions = "".join(
        f'<text class="n" x="{MARGIN}" y="{below + number * LINE}">{escape(printable(note))}</text>'
        for number, note in enumerate(notes)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" viewBox="0 0 {width} {total}" width="{width}" height="{total}" role="img">'
        f"<title>{escape(printable(title))}</title><style>{base_style()}{motion}{''.join(rules)}</style>"
        f'<rect class="b" x=".5" y=".5" width="{width - 1}" height="{total - 1}" rx="8"/>{"".join(groups)}{captions}</svg>\n'
    )


def _keyframes(number: int, span: Span, end_s: float) -> str:
    """Return the rules of one group: shown from begin to end; outside an animation only what stays is shown."""
    begin, end = (100 * at_s / end_s for at_s in span)
    stays = span[1] == float("inf")
    steps = "0%{visibility:hidden}" if begin else ""
    steps += f"{begin:.3f}%{{visibility:visible}}" + ("" if stays else f"{end:.3f}%,to{{visibility:hidden}}")
    return (
        f"@keyframes k{number}{{{steps}}}#g{number}{{{'' if stays else 'visibility:hidden;'}animation-name:k{number}}}"
    )


def _drawn(run: StyledRun, row: int) -> str:
    """Return one run, as wide as its cells whatever the font; an unknown colour is the text's own."""
    colour = ""
    if run.colour in COLOURS:
        colour = f' class="{run.colour}"'
    elif re.fullmatch("[0-9a-f]{6}", run.colour):
        colour = f' style="fill:#{run.colour}"'
    bold = ' font-weight="bold"' if run.is_bold else ""
    x, y = MARGIN + run.column * CELL, MARGIN + (row + 0.8) * LINE
    stretch = f'textLength="{run.cells * CELL:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {stretch}{colour}{bold}>{escape(printable(run.text))}</text>'


def spans_of(frames: Sequence[Frame]) -> dict[Span, list[tuple[int, Row]]]:
    """Return from when to when which rows are shown; what the last frame shows stays, until infinity."""
    spans: dict[Span, list[tuple[int, Row]]] = {}
    for number in range(max(len(frame.rows) for frame in frames)):
        shown: Row = ()
        since = 0.0
        for frame in frames:
            if frame.rows[number] == shown:
                continue
            if shown:
                spans.setdefault((since, frame.at_s), []).append((number, shown))
            shown, since = frame.rows[number], frame.at_s
        if shown:
            spans.setdefault((since, float("inf")), []).append((number, shown))
    return spans
