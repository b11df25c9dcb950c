"""A small evaluation for tests: two sets, of text and of tokens, and a probe of each kind; and what it costs, computed plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

TEXTS = [
    f"{number}: a story of {number * 7} words, " + "and then " * (number % 5) + "the end\u00e9" for number in range(23)
]
PROBABILITY: list[dict[str, Any]] = [
    {"prompt": "the capital of France is", "target": " Paris"},
    {"prompt": "two and two is ", "target": "four"},
    {"prompt": "", "target": "once upon a time there was a word that went on and on, longer than the model can see"},
]
PAIRS: list[dict[str, Any]] = [
    {"better": "The cats sleep.", "worse": "The cats sleeps."},
    {"sentence_good": "Who did she see?", "sentence_bad": "Who did she see him?", "UID": "x"},
    {"better": "One dog barks at a cat.", "worse": "One dogs barks at cat."},
]
CHOICE: list[dict[str, Any]] = [
    {"prompt": "Snow is", "choices": [" white", " black as coal", " a bird"], "answer": 0},
    {
        "ind": 4, "activity_label": "Baking", "ctx_a": "A man bakes.", "ctx_b": "he", "ctx": "A man bakes. he", "label": "1",
        "endings": ["eats a stone. [step] x", "opens the oven.", "is a tree.", "flies."],
    },
    {
        "id": "M_1", "question": "What falls from clouds?", "answerKey": "B",
        "choices": {"text": ["sand", "rain", "glass"], "label": ["A", "B", "C"]},
    },
    {"question": {"stem": "Ice is", "choices": [{"text": "cold", "label": "1"}, {"text": "hot", "label": "2"}]}, "answerKey": "1"},
    {"question": "1 + 1 =", "choices": ["1", "2", "3", "4"], "answer": 1, "subject": "elementary_mathematics"},
]  # fmt: skip


def write_lines(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def write_evaluation(folder: Path) -> dict[str, Any]:
    """Write sets and probes, and return the `[eval]` that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.arange(1000) * 37 % 251 + 1
    tokens[::29] = 0
    tokens.astype("<u2").tofile(folder / "flat.bin")
    stories = write_lines(folder / "stories.jsonl", [{"text": text} for text in TEXTS])
    kinds: dict[str, list[dict[str, Any]]] = {"probability": PROBABILITY, "pairs": PAIRS, "choice": CHOICE}
    urls = {kind: write_lines(folder / f"{kind}.jsonl", lines) for kind, lines in kinds.items()}
    return {
        "every": 1,
        "batches": 1,
        "sets": [
            {"name": "stories", "kind": "jsonl", "urls": [stories]},
            {"name": "flat", "kind": "tokens", "urls": [str(folder / "flat.bin")], "end": 0},
        ],
        "probes": [
            *({"name": kind, "kind": kind, "url": url} for kind, url in urls.items()),
            {"name": "one text", "kind": "probability", "url": urls["probability"], "limit": 1},
        ],
    }
