"""The scoreboard as a table and as a picture. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from race.failures import KINDS

Row = Mapping[str, Any]
TITLES = {
    "flashckpt": "dlrun + flashckpt", "dlrover": "DLRover 0.6.1", "dcp": "torchrun + dcp.async_save",
    "torch_checkpointing": "torchrun + torch_checkpointing 0.1.1", "torch_save": "torchrun + torch.save",
    "huggingface": "torchrun + HF Trainer", "lightning": "torchrun + Lightning", "torchft": "torchft 0.2.0",
}  # fmt: skip
COLOURS = {
    "flashckpt": "#1a7f37", "dlrover": "#8250df", "dcp": "#0969da", "torch_checkpointing": "#bf3989", "torch_save": "#9a6700",
    "huggingface": "#bc4c00", "lightning": "#57606a", "torchft": "#0a7ea4",
}  # fmt: skip
SHORT = {
    "none": "nothing", "rank": "a rank killed", "ranks": "all ranks", "machine": "the machine", "hang": "a rank hangs",
    "disk": "disk full 10 s", "resize": "2 ranks to 1",
}  # fmt: skip
WIDTH, LEFT, BAR = 900, 250, 11
MOST = 8.0  # beyond this a bar is cut, with its figure beside it


def best(rows: Sequence[Row]) -> dict[str, float]:
    """Return the lowest ratio of each kind among the runs that came to the end with nothing lost or doubled."""
    found: dict[str, float] = {}
    for row in rows:
        if row["finished"] and not row["lost"] and not row["doubled"]:
            found[row["kind"]] = min(row["ratio"], found.get(row["kind"], row["ratio"]))
    return found


def markdown(rows: Sequence[Row]) -> str:
    """Return one line per entrant and kind of failure; the best time of a kind is bold, also where it is not ours."""
    lead = best(rows)
    said = [
        "| failure | entrant | time / unbroken | s more | steps again | lost / doubled | last weights | MB written | peak MB | by hand |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        said += ["| " + " | ".join(_cells(row, lead)) + " |" for row in rows if row["kind"] == kind]
    return "\n".join(said)


def matrix(rows: Sequence[Row]) -> str:
    """Return one line per entrant, one column per kind of failure: time over unbroken, and what was wrong at the end."""
    kinds, lead = list(dict.fromkeys(row["kind"] for row in rows)), best(rows)
    said = [f"| time / unbroken | {' | '.join(SHORT[kind] for kind in kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for entrant in dict.fromkeys(row["entrant"] for row in rows):
        mine = {row["kind"]: row for row in rows if row["entrant"] == entrant}
        cells = [_short(mine[kind], lead) if kind in mine else "-" for kind in kinds]
        said.append(f"| {TITLES.get(entrant) or entrant} | {' | '.join(cells)} |")
    return "\n".join(said)


def _short(row: Row, lead: Mapping[str, float]) -> str:
    if not row["finished"]:
        return "not finished"
    ratio = f"{row['ratio']:.2f}"
    if wrong := max(row["lost"], row["doubled"]):
        return f"{ratio}, {wrong} {'lost' if row['lost'] else 'doubled'}"
    said = f"**{ratio}**" if row["ratio"] == lead.get(row["kind"]) else ratio
    return f"{said}, {row['interventions']} by hand" if row["interventions"] else said


def _cells(row: Row, lead: Mapping[str, float]) -> list[str]:
    ratio = f"{row['ratio']:.2f}" if row["finished"] else f"not finished ({row['done']} steps)"
    if row["finished"] and row["ratio"] == lead.get(row["kind"]):
        ratio = f"**{ratio}**"
    return [
        row["kind"],
        TITLES.get(row["entrant"]) or row["entrant"],
        ratio,
        f"{row['seconds'] * (1 - 1 / row['ratio']):.1f}" if row["finished"] and row["ratio"] else "-",
        str(row["again"]),
        f"{row['lost']} / {row['doubled']}",
        weights(row),
        "-" if row["written_bytes"] is None else f"{row['written_bytes'] / 1e6:.0f}",
        f"{row['peak_bytes'] / 1e6:.0f}",
        str(row["interventions"]),
    ]


def weights(row: Row) -> str:
    """Return how the last weights compare with those of the same entrant's unbroken run."""
    if not row["finished"]:
        return "-"
    if row["equal"]:
        return "equal"
    return "other" if row["distance"] is None else f"{row['distance']:.0e} off"


def svg(rows: Sequence[Row], title: str, notes: Sequence[str]) -> str:
    """Return the picture: per kind one bar per entrant, its length the time over the unbroken run's."""
    parts, y = [], 46.0
    scale = (WIDTH - LEFT - 290) / (MOST - 1)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        parts.append(_text(16, y + 11, KINDS[kind], bold=True))
        y += 17
        for row in (row for row in rows if row["kind"] == kind):
            length = max(1.5, (min(row["ratio"], MOST) - 1) * scale) if row["finished"] else (MOST - 1) * scale
            colour = COLOURS.get(row["entrant"], "#57606a")
            style = f'fill="{colour}"' if row["finished"] else f'fill="none" stroke="{colour}" stroke-dasharray="3 3"'
            parts.append(_text(30, y + BAR - 1, TITLES.get(row["entrant"]) or row["entrant"]))
            parts.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{length:.1f}" height="{BAR}" rx="2" {style}/>')
            parts.append(_text(LEFT + length + 6, y + BAR - 1, _figure(row)))
            y += BAR + 5
        y += 7
    axis = f'<line x1="{LEFT}" x2="{LEFT}" y1="40" y2="{y:.0f}" stroke="#8c959f"/>'
    for note in notes:
        parts.append(_text(16, y + 14, note))
        y += 16
    style = "text{font:11px ui-sans-serif,system-ui,sans-serif;fill:#24292f}.b{fill:#fff;stroke:#d0d7de}"
    dark = "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.b{fill:#0d1117;stroke:#30363d}}"
    height = round(y + 18)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
        f"<title>{escape(title)}</title><style>{style}{dark}</style>"
        f'<rect class="b" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
        f"{_text(16, 26, title, bold=True)}{axis}{''.join(parts)}</svg>\n"
    )


def _figure(row: Row) -> str:
    if not row["finished"]:
        return f"not finished, {row['interventions']} by hand"
    said = [f"{row['ratio']:.2f}x"]
    if row["lost"] or row["doubled"]:
        said.append(f"{row['lost']} lost, {row['doubled']} doubled")
    if not row["equal"]:
        said.append(f"weights {weights(row)}")
    if row["interventions"]:
        said.append(f"{row['interventions']} by hand")
    return ", ".join(said)


def _text(x: float, y: float, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{weight}>{escape(text)}</text>'
