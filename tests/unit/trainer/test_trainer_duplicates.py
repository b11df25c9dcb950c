"""What `data duplicates` and `data prepare` say of the sources of a run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from support.evaluation import write_lines

from flashckpt.errors import ConfigError
from flashckpt.trainer import __main__ as command
from flashckpt.trainer.config.data import DataConfig, SourceConfig
from flashckpt.trainer.prepare.command import find_duplicates

STORY = " ".join(
    f"In the year {n} the river ran slowly past the {n * 7} old mills, and nobody knew where it went." for n in range(9)
)
ENGLISH = [STORY, "Something else altogether, about ships and the sea.", STORY, " "]
CHINESE = [
    "\u5728\u6cb3\u8fb9\u6709\u4e00\u5ea7\u53e4\u8001\u7684\u78e8\u574a\uff0c\u6751\u91cc\u6ca1\u6709\u4eba\u77e5\u9053\u5b83\u7684\u5386\u53f2"
    * 3
]


def sources(folder: Path) -> tuple[SourceConfig, ...]:
    texts = {"en": ENGLISH, "zh": [*CHINESE, STORY.replace("year 5 the", "summer"), *CHINESE]}
    return tuple(
        SourceConfig(
            kind="jsonl", channel=name, urls=(write_lines(folder / f"{name}.jsonl", [{"text": one} for one in few]),)
        )
        for name, few in texts.items()
    )


def test_documents_that_repeat_an_earlier_one_are_counted_by_channel(tmp_path: Path) -> None:
    found = find_duplicates(DataConfig(sources=sources(tmp_path)), near=False)
    assert {name: (one.documents, one.exact, one.near) for name, one in found.items()} == {
        "en": (3, 1, 0),
        "zh": (3, 1, 0),
    }
    ((kind, where, earlier),) = found["en"].pairs
    assert kind == "exact"
    assert where.startswith("the line at byte ")
    assert where.endswith(f" of {tmp_path}/en.jsonl")
    assert earlier == f"the line at byte 0 of {tmp_path}/en.jsonl" != where


def test_near_duplicates_are_found_over_channels(tmp_path: Path) -> None:
    pytest.importorskip("datasketch")
    found = find_duplicates(DataConfig(sources=sources(tmp_path)), near=True)
    assert {name: (one.documents, one.exact, one.near) for name, one in found.items()} == {
        "en": (3, 1, 0),
        "zh": (3, 1, 1),
    }
    assert [pair[0] for pair in found["zh"].pairs] == ["near", "exact"]


def test_near_duplicates_without_the_library_are_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="datasketch"):
        find_duplicates(DataConfig(sources=sources(tmp_path)), near=True)


def test_the_commands_say_channels_epochs_and_duplicates(tmp_path: Path, capfd: Any) -> None:
    sources(tmp_path)
    (tmp_path / "run.toml").write_text(
        "[train]\nsteps = 10\nseq_len = 16\nglobal_batch = 4\nmicro_batch = 4\n[data]\nholdout_every = 1000\n"
        f"folder = '{tmp_path}/tokens'\n"
        + "".join(
            f"[[data.sources]]\nkind = 'jsonl'\nurls = ['{tmp_path}/{name}.jsonl']\nchannel = '{name}'\n"
            for name in ("en", "zh")
        )
    )
    words = ["--config", str(tmp_path / "run.toml")]
    assert command.main(["data", "prepare", *words]) == 0
    said = capfd.readouterr().out
    tokens = sum(len(text.encode()) + 1 for text in ENGLISH[:3])
    assert (
        f"  en: 3 documents, {tokens / 1e3:.1f} k tokens, 0 held out; {320 / tokens:.3g} epochs in 10 steps\n" in said
    )
    assert command.main(["data", "duplicates", *words]) == 0
    said = capfd.readouterr().out
    assert "en: 3 documents, duplicates: 1 exact (33.3%), 0 near (0.0%)\n  exact: " in said
    assert command.main(["data", "count", *words]) == 10
    assert "data duplicates" in capfd.readouterr().err
