"""The results of an evaluation, and how they are written: plain values, curves, lines, a table. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COUNTS = ("questions", "cut")
"""Figures of a probe that say how many there were, not how the model did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A text: `loss` in nats per predicted token, `tokens` that were predicted, bits per byte of their text.

    `bits_per_byte` is of the tokens that are text, without those that end documents; nan where the text is not known.
    """

    loss: float
    tokens: int
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(min(self.loss, 700.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The results of one evaluation, by the names of channels, sets and probes."""

    held_out: Mapping[str, Score] = field(default_factory=dict)
    sets: Mapping[str, Score] = field(default_factory=dict)
    probes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def plain_scores(scores: Scores) -> dict[str, Any]:
    """Return the results as values of JSON; what is not known is None."""
    found: dict[str, Any] = {
        part: {name: _plain(score) for name, score in texts.items()}
        for part, texts in (("held_out", scores.held_out), ("sets", scores.sets))
        if texts
    }
    if scores.probes:
        found["probes"] = {name: _rounded(figures) for name, figures in scores.probes.items()}
    return found


def curves_of(scores: Scores) -> dict[str, float]:
    """Return the points of an evaluation by the names of their curves."""
    found: dict[str, float] = {}
    for part, texts in (("held out", scores.held_out), ("sets", scores.sets)):
        for name, score in texts.items():
            found[f"{part}/{name} loss"] = score.loss
            if not math.isnan(score.bits_per_byte):
                found[f"{part}/{name} bits per byte"] = score.bits_per_byte
    for name, figures in scores.probes.items():
        found |= {f"probes/{name} {key}": value for key, value in figures.items() if key not in COUNTS}
    return found


def score_lines(scores: Scores) -> list[str]:
    """Return the results as lines of a log: one for each part, and one for each probe."""
    lines = [
        f"{part}: " + "  ".join(f"{name} {_words(score)}" for name, score in texts.items())
        for part, texts in (("held out", scores.held_out), ("sets", scores.sets))
        if texts
    ]
    return lines + [f"probe {name}: {_figures(figures)}" for name, figures in scores.probes.items()]


def score_table(scores: Scores) -> str:
    """Return the results as a table of one row for each text, and a line for each probe."""
    rows = [("", "tokens", "loss", "perplexity", "bits/byte")]
    for part, texts in (("held out ", scores.held_out), ("", scores.sets)):
        for name, score in texts.items():
            cells = (f"{score.tokens:,}", f"{score.loss:.4f}", f"{score.perplexity:.2f}", _bits(score))
            rows.append((part + name, *cells))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    table = lines if len(rows) > 1 else []
    return "".join(f"{line}\n" for line in [*table, *(f"{name}: {_figures(f)}" for name, f in scores.probes.items())])


def _plain(score: Score) -> dict[str, Any]:
    return _rounded(
        {
            "loss": score.loss,
            "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte,
            "tokens": score.tokens,
        }
    )


def _rounded(figures: Mapping[str, float]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, int) else round(value, 6) if math.isfinite(value) else None
        for name, value in figures.items()
    }


def _bits(score: Score) -> str:
    return "n/a" if math.isnan(score.bits_per_byte) else f"{score.bits_per_byte:.3f}"


def _words(score: Score) -> str:
    return f"ppl {score.perplexity:.2f} ({_bits(score)} bits/byte)"


def _figures(figures: Mapping[str, float]) -> str:
    words = [f"{name} {value:.4f}" for name, value in figures.items() if name not in COUNTS]
    cut = f", {figures['cut']} texts cut" if figures["cut"] else ""
    return f"{'  '.join(words)} ({figures['questions']} questions{cut})"
