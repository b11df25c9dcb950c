"""Runs over a mixture of two channels of short documents, whose windows are masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.prepare.shards import prepare
from support.training import run_config, write_corpus


def documents_run(folder: Any, parallel: dict[str, Any], *, sections: Any = None, **data: Any) -> RunConfig:
    """Return a run over two sources of short documents; `sections` override it key by key."""
    sources = [
        {"kind": "text", "urls": [f"{folder}/text/{name}/*.txt"], "channel": name, "weight": weight}
        for name, weight in (("a", 3), ("b", 1))
    ]
    values: dict[str, dict[str, Any]] = {
        "model": {"window": 9, "window_from": 2},
        "train": {"seq_len": 32, "global_batch": 8, "micro_batch": 2},
        "parallel": parallel,
        "data": {
            "source": ["stdlib"],
            "folder": str(folder / "tokens"),
            "sources": sources,
            "holdout_every": 4,
            **data,
        },
        "eval": {"every": 1, "batches": 1},
    }
    for section, content in (sections or {}).items():
        values[section] = {**values.get(section, {}), **content}
    return run_config(folder, **values)


def write_documents(folder: Path) -> None:
    """Write and prepare text whose documents are a few words: every window has several."""
    write_corpus(folder / "all")
    for channel in "ab":
        (folder / "text" / channel).mkdir(parents=True)
        for number, path in enumerate(sorted((folder / "all" / channel).iterdir())[:20]):
            for piece, line in enumerate(path.read_text().splitlines()[:8]):
                (folder / "text" / channel / f"{number}.{piece}.txt").write_text(line)
    prepare(documents_run(folder, {}).data)
