"""Pictures, with matplotlib where it is installed (the `trainer` extra)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError


def figure(title: str, panels: int = 1) -> tuple[Any, Any]:
    """Return a figure and its axes (one, or an array of `panels`), drawn without a display.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib", found=str(error), remedy='pip install "flashckpt[trainer]", or drop --plot'
        ) from error
    drawing = Figure(figsize=(6.4 * panels, 4.4), layout="constrained")
    FigureCanvasAgg(drawing)
    drawing.suptitle(title)
    return drawing, drawing.subplots(1, panels)


def finish(drawing: Any, path: Path) -> None:
    """Write the figure; ConfigError where the file cannot be written."""
    try:
        drawing.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written", found=str(error)) from error


def draw_bench(document: Mapping[str, Any], path: Path) -> None:
    """Draw the distribution of the seconds per part, and the rates per rank where there are several."""
    results = document["results"]
    parts = {name: values for name, values in results.get("parts_s", {}).items() if values}
    ranks = {name: values for name, values in results.get("rank_bytes_per_s", {}).items() if values}
    panels = max(1, bool(parts) + bool(ranks))
    note = ", under load" if document["load"]["loaded"] else ""
    drawing, axes = figure(f"flashckpt bench {document['kind']}, {document['time']}{note}", panels)
    free = list(axes) if panels > 1 else [axes]
    if parts:
        axis = free.pop(0)
        for name, values in parts.items():
            ordered = sorted(1e3 * value for value in values)
            axis.step(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=name)
        axis.set_xscale("log")
        axis.set_xlabel("ms per part")
        axis.set_ylabel("% of parts at most")
        axis.legend()
    if ranks:
        axis = free.pop(0)
        width = 0.8 / len(ranks)
        for number, (name, values) in enumerate(ranks.items()):
            places = [rank + number * width for rank in range(len(values))]
            axis.bar(places, [value / 1e9 for value in values], width, label=name)
        axis.set_xlabel("rank")
        axis.set_xticks([rank + 0.4 - width / 2 for rank in range(len(values))], [str(r) for r in range(len(values))])
        axis.set_ylabel("GB/s")
        axis.legend()
    finish(drawing, path)


def refuse_picture_without(path: Path) -> None:
    """Raise ConfigError unless `path` names a picture in a folder that exists, before anything is computed."""
    if path.suffix not in {".png", ".svg", ".pdf"} or not path.absolute().parent.is_dir():
        raise ConfigError(
            f"{path} cannot be drawn", expected="a file name ending in .png, .svg or .pdf in a folder that exists"
        )
