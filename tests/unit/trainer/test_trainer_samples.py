"""`[samples]`: what is refused before torch, which tokenizer a run's prompts and checkpoints have, and the demo's words."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.training import run_config

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig, from_values, read_config, to_toml
from flashckpt.trainer.demo import run as demo
from flashckpt.trainer.demo.__main__ import DEFAULT_CONFIG
from flashckpt.trainer.generate.prompts import read_prompts
from flashckpt.trainer.hub.source import SavedWeights
from flashckpt.trainer.hub.tokenizer_files import files_of_saved


@pytest.mark.parametrize(
    ("samples", "named"),
    [
        ({"every": 5}, "samples.every has no prompts"),
        ({"prompts": ["a"]}, "samples.prompts would have no effect"),
        ({"max_tokens": 3}, "samples.max_tokens would have no effect"),
        ({"temperature": 0.5}, "samples.temperature would have no effect"),
        ({"every": -1, "prompts": ["a"]}, "samples.every is too small"),
        ({"every": 1, "prompts": ["a"], "max_tokens": 0}, "samples.max_tokens is too small"),
        ({"every": 1, "prompts": ["a"], "temperature": -0.1}, "samples.temperature is out of range"),
        ({"every": 1, "prompts": ["a"], "top_p": 1.1}, "samples.top_p is out of range"),
        ({"every": 1, "prompts": ["a"], "seed": -1}, "samples.seed is out of range"),
        ({"every": 1, "prompt": ["a"]}, "unknown setting 'samples.prompt'"),
    ],
)
def test_wrong_settings_are_refused(samples: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_values({"samples": samples})
    assert named in str(raised.value)


def test_a_prompt_that_fills_the_window_is_refused_before_torch(tmp_path: Path) -> None:
    config = run_config(tmp_path, samples={"every": 1, "prompts": ["x" * 16]})
    (tmp_path / "run.toml").write_text(to_toml(config))
    program = (
        "import sys; from flashckpt.trainer.__main__ import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", program, "--config", str(tmp_path / "run.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ConfigError.exit_code, done.stderr
    assert "a prompt of samples.prompts is too long" in done.stderr


def test_a_run_on_tokens_needs_a_tokenizer_for_its_samples(tmp_path: Path) -> None:
    config = from_values(
        {
            "data": {"sources": [{"kind": "tokens", "urls": ["x.bin"]}]},
            "samples": {"every": 1, "prompts": ["a"]},
        }
    )
    with pytest.raises(ConfigError, match="samples need a tokenizer"):
        read_prompts(config)


class Recorded(SavedWeights):
    """What a checkpoint says of its run, without a checkpoint."""

    def __init__(self, vocab: int, **recorded: Any) -> None:
        self.beside, self.recorded, self.cwd = {}, recorded, ""
        self.model = from_values({"model": {"vocab": vocab}}).model


def test_the_tokenizer_of_a_checkpoint_is_the_one_its_run_trained(tmp_path: Path) -> None:
    bytes_only = {"sources": [{"kind": "text", "tokenizer": ""}], "bpe": 0, "tokenizer": ""}
    trained = {**bytes_only, "bpe": 512, "folder": str(tmp_path)}
    tokens = {**bytes_only, "sources": [{"kind": "tokens", "tokenizer": ""}]}
    assert files_of_saved(Recorded(300, data=bytes_only))["tokenizer.json"]
    assert files_of_saved(Recorded(256))["tokenizer.json"]
    assert files_of_saved(Recorded(512, data=trained)) == {}
    assert files_of_saved(Recorded(512, data=tokens)) == {}
    (tmp_path / "index-0.json").write_text(
        json.dumps({"settings": {}, "sources": [], "tokenizer": "../elsewhere/tokenizer-1.json"})
    )
    (tmp_path / "tokenizer-1.json").write_text("{}")
    assert files_of_saved(Recorded(512, data=trained)) == {"tokenizer.json": b"{}"}
    (tmp_path / "tokenizer.json").write_text("[]")
    named = {**tokens, "tokenizer": str(tmp_path / "tokenizer.json"), "folder": "nowhere"}
    assert files_of_saved(Recorded(512, data=named)) == {"tokenizer.json": b"[]"}


@pytest.mark.parametrize("unread", ["index-1.json", "tokenizer-1.json", "named.json"])
@pytest.mark.parametrize("name", ["EACCES", "EIO"])
def test_a_tokenizer_that_cannot_be_read_is_not_replaced_by_another(
    unread: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by none, nor by that of `init.from`; `index-1.json` stands for the folder's own file that names it."""
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "tokenizer.json").write_text("[]")
    if unread != "named.json":
        (tmp_path / "index-1.json").write_text(
            json.dumps({"settings": {}, "sources": [], "tokenizer": "tokenizer-1.json"})
        )
        (tmp_path / "tokenizer-1.json").write_text("{}")
    (tmp_path / "named.json").write_text("{}")
    data = {"tokenizer": str(tmp_path / "named.json"), "folder": str(tmp_path), "sources": []}
    saved = Recorded(256, data=data, init={"from": str(tmp_path / "origin")})
    assert files_of_saved(saved) == {"tokenizer.json": b"{}"}
    real = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == unread:
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match="the tokenizer of the run cannot be read") as caught:
        files_of_saved(saved)
    assert unread in caught.value.found
    assert caught.value.settle() == (41 if name == "EIO" else 10)


def test_a_tokenizer_of_other_settings_in_the_same_folder_is_not_the_runs(tmp_path: Path) -> None:
    """The folder was prepared again since, with another one; and 256 tokens of an own tokenizer are not bytes."""
    index = {"settings": {"tokenizer": "", "bpe": 400}, "sources": [], "tokenizer": "tokenizer-2.json"}
    (tmp_path / "index-2.json").write_text(json.dumps(index))
    (tmp_path / "tokenizer-2.json").write_text("[]")
    assert files_of_saved(Recorded(512, data={"bpe": 512, "folder": str(tmp_path), "sources": []})) == {}
    assert files_of_saved(Recorded(400, data={"bpe": 400, "folder": str(tmp_path), "sources": []})) != {}
    assert files_of_saved(Recorded(256, data={"tokenizer": "gone", "folder": str(tmp_path), "sources": []})) == {}


# -- the demo's words


def test_the_demo_falls_back_to_bytes_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(DEFAULT_CONFIG)
    assert config.data.bpe == config.model.vocab
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    plain = read_config(DEFAULT_CONFIG, demo.without_library(config))
    assert (plain.data.bpe, plain.model.vocab) == (0, 256)
    assert plain.data.folder != config.data.folder
    assert demo.without_library(RunConfig()) == []


def test_the_demo_prepares_its_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(DEFAULT_CONFIG, ["--data.bpe", "0", "--model.vocab", "256", "--data.folder", str(tmp_path)])
    said = demo.prepare_text(config)
    assert said.startswith("prose 0.")
    assert said.endswith(" M bytes")
    monkeypatch.setattr(demo, "prepare", lambda _: pytest.fail("it is prepared"))
    assert demo.prepare_text(config) == said


def test_what_generate_cannot_say_is_its_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    talks, text = demo.say_words(tmp_path / "empty")
    assert not talks
    assert "NoCheckpointError" in text
